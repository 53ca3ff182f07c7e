"""How long a test waits for what comes for certain: a slow machine is no failure."""

import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

PATIENCE = 600  # seconds


def still_running(
    processes: Iterable[psutil.Process | int], timeout: float = PATIENCE
) -> list[psutil.Process]:
    """Wait until all these processes, or ids of processes, have ended; return those that have not.
    A zombie has ended: where process 1 reaps nobody, an orphan remains one."""
    left = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(process) if isinstance(process, int) else process)
    deadline = time.monotonic() + timeout
    while (left := [*filter(_runs, left)]) and time.monotonic() < deadline:
        time.sleep(0.02)  # polling processes that are no children of this one
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
