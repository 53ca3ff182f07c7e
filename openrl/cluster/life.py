"""Signs of life: each worker's process has a log, and touches it as long as it moves."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

BEAT_S = 5.0
"""Seconds between two touches."""


@dataclass(frozen=True)
class LogSpec:
    """Where workers leave their logs, and how long one may show no sign of life."""

    directory: str = ""  # absolute; empty: Ray's own logs alone
    stall_timeout: float = 0.0  # seconds; 0: for ever

    def path(self, role: str, rank: int) -> str:
        return str(Path(self.directory) / f"{role}-{rank}.log") if self.directory else ""


NO_LOGS = LogSpec()


def begin_log(path: str, who: str) -> None:
    """Send what this process and its children print to the end of ``path`` from now on, and touch
    it every BEAT_S. A directory that this machine does not have leaves all as it is."""
    if not Path(path).parent.is_dir():
        return
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    os.write(file, f"-- {who}, process {os.getpid()}, {started}\n".encode())
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    threading.Thread(target=_beat, args=(Path(path),), daemon=True).start()


def _beat(path: Path) -> None:
    """A stopped child counts for its parent: it is waited for."""
    own = psutil.Process()
    while True:
        time.sleep(BEAT_S)
        with suppress(OSError, psutil.Error):
            stopped = [c for c in own.children(recursive=True) if c.status() == "stopped"]
            if not stopped:
                os.utime(path)


def silence(path: str) -> float | None:
    """Seconds since the process of this log last moved; None if nobody knows."""
    with suppress(OSError):
        return time.time() - Path(path).stat().st_mtime
    return None
