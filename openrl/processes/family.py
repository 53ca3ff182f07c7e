"""A process and all that it started: how much memory they take, and their end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import defaultdict

import psutil

MARK = "OPENRL_PROCESS"  # variable that a process and all that it starts carry
STALE = 0.2  # seconds; who started whom is looked up by all that are watched together


def kill_family(pid: int, mark: str) -> None:
    """End a process that leads its session and was not waited for, and all that it started: those
    that left its session carry the ``mark`` in their variable MARK."""
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
    """Processes that carry the mark, wherever their parents went."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants; 0 if it has ended."""
    total = 0
    for member in _started.family(pid):
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(member).memory_info().rss
    return total


class _Started:
    """Who started whom. Every look at it reads all processes of the machine, which takes
    milliseconds: dozens that are watched share one."""

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
