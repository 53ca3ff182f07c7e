"""A limit on the processor time that judging one answer may take."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class TooSlow(BaseException):
    """The time is up. This is not an Exception, because algebra libraries catch those and go on."""


@contextlib.contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the block once it has used this much processor time. Wall time does not
    count, so a busy machine changes no verdict. The limit works only in the main thread, which is
    where reward processes judge, and it does not interrupt a single C operation."""
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
