"""What becomes of a cluster of our own when its driver is killed: a small process beside the driver
ends Ray's processes, of which agents would go on for minutes, and removes what they wrote.

    python -I caretaker.py SESSION_DIRECTORY RAYLET_PID

waits until its standard input ends, as it does with the driver however that goes. Standard library
only, and nothing of this package: it is alive as long as the run."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 20.0  # until killed processes are gone


def of_cluster(session: str, raylet: int) -> Iterator[int]:
    """Processes with the raylet's number in their environment, as all that it starts, or that write
    to files of the session: the title of an agent lies over its environment. Who reads a log is not
    of the cluster."""
    mark = f"RAY_RAYLET_PID={raylet}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            marked = mark in (process / "environ").read_bytes().split(b"\0")
            if marked or any(name.startswith(f"{session}/") for name in written_files(process)):
                yield int(process.name)


def written_files(process: Path) -> Iterator[str]:
    """What it has open for writing. Timers and watches have flags of their own, on other lines."""
    for file in (process / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            lines = (process / "fdinfo" / file.name).read_text().splitlines()
            (flags,) = (line.removeprefix("flags:") for line in lines if line.startswith("flags:"))
            if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                yield str(file.readlink())


def end(session: str, raylet: int, driver: int) -> None:
    """All but the driver, which ends by itself where it was not killed."""
    deadline = time.monotonic() + PATIENCE_S
    while (alive := {*of_cluster(session, raylet)} - {driver}) and time.monotonic() < deadline:
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # meant for the driver, which may take its time
    driver = os.getppid()
    sys.stdin.read()
    end(sys.argv[1], int(sys.argv[2]), driver)
    shutil.rmtree(sys.argv[1], ignore_errors=True)
