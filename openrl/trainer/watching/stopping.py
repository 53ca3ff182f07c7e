"""Signals that ask a run to end, so that it saves its state if there is time."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from openrl.errors import Interrupted
from openrl.waiting import cancel_all

Result = TypeVar("Result")
SIGNALS = (signal.SIGTERM, signal.SIGINT)  # Slurm and Kubernetes send the first, Ctrl-C the second


class StopRequest:
    """A request to stop, made by signals. The first signal asks the run to end within ``grace``
    seconds; the second ends the process at once."""

    def __init__(self, grace: float = 30.0) -> None:
        self.grace, self.signal = grace, 0
        # True once there is something to save: the run then ends by itself within ``grace``
        self.saves = False
        self._signalled = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for signals inside the with block. Does nothing outside the main thread, which
        alone receives signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number, task)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals, task: asyncio.Task[object]) -> None:
        if self.signal:
            print(f"{number.name} again: ended at once", file=sys.stderr, flush=True)
            os._exit(128 + number)
        self.signal = number
        self._signalled.set()
        if self.saves:
            print(f"{number.name}: the run saves what it has and ends", file=sys.stderr, flush=True)
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self.grace, task.cancel)
        else:
            task.cancel()

    async def unless_stopped(self, work: Awaitable[Result]) -> Result | None:
        """Return the result of ``work``. If the run is asked to end first, cancel the work and
        return None."""
        task, came = asyncio.ensure_future(work), asyncio.ensure_future(self._signalled.wait())
        try:
            await asyncio.wait({task, came}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            await cancel_all([task, came])

    def interrupted(self, what: str, remedy: str = "") -> Interrupted:
        """Return the exception that ends the run, for the caller to raise. Lifts the deadline, so
        that the clean-up has all the time it needs."""
        if self._deadline:
            self._deadline.cancel()
        number = self.signal or signal.SIGTERM  # without a signal of our own another rank got it
        return Interrupted(number, f"{signal.Signals(number).name}: {what}", remedy)
