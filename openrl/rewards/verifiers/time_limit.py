"""A bound on what judging one answer may cost."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class TooSlow(BaseException):
    """The time is up. No Exception: libraries of algebra catch those and go on."""


@contextlib.contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """Raises TooSlow in the block once it has used so much processor time of this process; a busy
    machine changes no verdict. Without effect outside of the main thread, which is where reward
    processes judge; a single operation of C is not interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TooSlow(f"more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
