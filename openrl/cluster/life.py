"""Signs of life: each worker process has a log file and touches it regularly while it runs."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

BEAT_S = 5.0
"""Seconds between two touches of the log file."""


def begin_log(path: str) -> None:
    """Append the output of this process and its children to ``path`` from now on, and touch the
    file every BEAT_S seconds. Do nothing if its directory does not exist on this machine."""
    if not Path(path).parent.is_dir():
        return
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    os.write(file, f"-- {Path(path).stem}, process {os.getpid()}, {started}\n".encode())
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    threading.Thread(target=_beat, args=(Path(path),), daemon=True).start()


def _beat(path: Path) -> None:
    """Touch the log forever, except while a child is stopped (SIGSTOP): its parent waits for it, so
    both count as stalled."""
    own = psutil.Process()
    while True:
        time.sleep(BEAT_S)
        with suppress(OSError, psutil.Error):
            stopped = [c for c in own.children(recursive=True) if c.status() == "stopped"]
            if not stopped:
                os.utime(path)


def silence(path: str) -> float | None:
    """Return the seconds since this log's process last gave a sign of life; None if unknown."""
    with suppress(OSError):
        return time.time() - Path(path).stat().st_mtime
    return None
