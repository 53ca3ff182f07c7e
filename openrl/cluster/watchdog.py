"""A small process next to the driver that cleans up a cluster of our own, even if the driver is
killed: it kills Ray's processes, some of which would live on for minutes, and removes their files.

    python -I watchdog.py SESSION_DIRECTORY RAYLET_PID

waits for the end of its standard input, which closes when the driver ends for whatever reason. It
lives as long as the run, so it imports the standard library only and nothing of this package."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 20.0  # how long to wait for killed processes to disappear


def cluster_pids(session: str, raylet: int) -> Iterator[int]:
    """Yield the pids of the cluster's processes. A process belongs to the cluster if its
    environment names the raylet, as in everything that the raylet starts, or if it writes to a file
    of the session: Ray's agents overwrite their environment with a process title. A process that
    only reads a log does not belong."""
    mark = f"RAY_RAYLET_PID={raylet}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            marked = mark in (process / "environ").read_bytes().split(b"\0")
            if marked or any(name.startswith(f"{session}/") for name in written_files(process)):
                yield int(process.name)


def written_files(process: Path) -> Iterator[str]:
    """Yield the files that the process has open for writing. The fdinfo of timers and watches has
    further lines that mention flags, so only the line that starts with "flags:" counts."""
    for file in (process / "fd").iterdir():
        with suppress(OSError):  # the file was closed meanwhile
            lines = (process / "fdinfo" / file.name).read_text().splitlines()
            (flags,) = (line.removeprefix("flags:") for line in lines if line.startswith("flags:"))
            if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                yield str(file.readlink())


def is_cleaner(pid: int) -> bool:
    """Return whether this is Python's resource tracker, which removes the shared memory of its
    processes when all of them have ended, and then ends itself."""
    with suppress(OSError):
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def end(session: str, raylet: int, driver: int) -> None:
    """Kill every process of the cluster but the driver: if still alive, it ends by itself."""
    deadline = time.monotonic() + PATIENCE_S
    while alive := {*cluster_pids(session, raylet)} - {driver}:
        late = time.monotonic() >= deadline
        for pid in alive:
            if late or not is_cleaner(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if late:
            return
        time.sleep(0.1)


def remove_link(session: Path) -> None:
    """Remove the link beside the session that Ray made to it, unless it leads to a later one."""
    link = session.parent / "session_latest"
    with suppress(OSError):
        if link.readlink().name == session.name:
            link.unlink()


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # meant for the driver, which may still be saving
    driver = os.getppid()
    sys.stdin.read()
    end(sys.argv[1], int(sys.argv[2]), driver)
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    remove_link(Path(sys.argv[1]))
