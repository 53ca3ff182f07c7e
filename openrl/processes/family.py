"""A process and everything it started: how much memory they use, and how to kill them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import defaultdict

import psutil

MARK = "OPENRL_PROCESS"  # environment variable that a process and all its descendants inherit
STALE = 0.2  # seconds for which one scan of all processes is reused


def kill_family(pid: int, mark: str) -> None:
    """Kill a process and everything it started. The process must lead its session and must not
    have been waited for. Descendants that left the session are found by ``mark``, the value of
    their environment variable MARK."""
    family = _family(pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for process in [*family, *_marked(mark)]:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _family(pid: int) -> list[psutil.Process]:
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.Error:
        return []


def _marked(mark: str) -> list[psutil.Process]:
    """Return the processes that carry the mark, including those whose parents have ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process and its descendants; 0 if it has ended."""
    total = 0
    for member in _started.family(pid):
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(member).memory_info().rss
    return total


class _Started:
    """The process tree of the machine. A scan of all processes takes milliseconds, so the dozens
    of processes that are watched share one."""

    def __init__(self) -> None:
        self._lock, self._looked = threading.Lock(), -STALE
        self._children: dict[int, list[int]] = {}

    def family(self, pid: int) -> list[int]:
        with self._lock:
            if time.monotonic() - self._looked >= STALE:
                self._look()
        found = [pid]
        for member in found:
            found += (child for child in self._children.get(member, ()) if child not in found)
        return found

    def _look(self) -> None:
        children: dict[int, list[int]] = defaultdict(list)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                children[process.ppid()].append(process.pid)
        self._children, self._looked = dict(children), time.monotonic()


_started = _Started()
