"""Processes of one target that are lent out: for a call, or for all calls of an episode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from typing import Any

from openrl.errors import UserError
from openrl.processes.child import CallFailed, ChildProcess, Limits
from openrl.processes.worker import Target

Answerer = Callable[[Any], Awaitable[Any]]
"""Answers a question that the code asks in the middle of a call."""


class Lease:
    """A process for one borrower, who makes one call at a time."""

    def __init__(self, pool: ProcessPool, process: ChildProcess) -> None:
        self.process, self._pool = process, pool
        self.last: Future[Any] | None = None  # the call that was made last

    async def call(
        self, value: Any, answerer: Answerer | None = None, timeout: float | None = None
    ) -> Any:
        """What the target returns. ``timeout`` takes the place of that of the limits. A caller that
        is cancelled ends the process.

        Raises CallFailed, and UserError if the target has never been loaded and does not load."""
        loop = asyncio.get_running_loop()

        def answers(question: Any) -> Future[Any]:
            assert answerer is not None
            return asyncio.run_coroutine_threadsafe(_awaited(answerer(question)), loop)

        return await self._do(self.process.call, value, answerer and answers, timeout)

    async def start(self) -> None:
        """Have a process that has loaded the target, so that the first call waits for nothing.

        Raises as ``call``."""
        await self._do(self.process.ready)

    @property
    def is_alive(self) -> bool:
        """The process runs and holds what earlier calls have made."""
        return self.process.is_running and not self.process.interrupted

    async def _do(self, blocking: Callable[..., Any], *arguments: Any) -> Any:
        self._pool.check_open()
        self.last = self._pool.threads.submit(blocking, *arguments)
        try:
            return await asyncio.wrap_future(self.last)
        except UserError as error:
            if self._pool.facts is None:
                raise
            raise CallFailed(str(error)) from None  # it loads: it is this process that failed
        except asyncio.CancelledError:
            if not self.last.cancelled():  # it had begun
                self.process.interrupt()
            raise


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


class ProcessPool:
    """Up to ``size`` processes of one target, started as they are needed together.

    The threads of ``threads`` bound the calls that run at a time; those beyond wait without using
    up their time."""

    def __init__(
        self, target: Target, size: int, limits: Limits, kind: str, threads: Executor
    ) -> None:
        """``kind`` is the word for its processes in messages."""
        self.kind, self.threads = kind, threads
        self._processes = [ChildProcess(target, limits, kind) for _ in range(size)]
        self._idle: asyncio.LifoQueue[ChildProcess] = asyncio.LifoQueue()
        self.closed = False
        for process in self._processes:
            self._idle.put_nowait(process)

    @property
    def facts(self) -> Any:
        """What the target says of itself; None before the first call."""
        return next((p.facts for p in self._processes if p.facts is not None), None)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Lease]:
        """Wait for a free process. Raises CallFailed once the pool is closed."""
        lease = await self.borrow()
        try:
            yield lease
        finally:
            self.give_back(lease)

    async def borrow(self) -> Lease:
        """As ``lease``, for who calls ``give_back`` on every way out."""
        lease = Lease(self, await self._idle.get())
        try:
            self.check_open()
        except CallFailed:
            self.give_back(lease)
            raise
        return lease

    def check_open(self) -> None:
        """Raises CallFailed once the pool is closed."""
        if self.closed:
            raise CallFailed(f"the {self.kind} processes are closed")

    def give_back(self, lease: Lease) -> None:
        """The process is free once the last call has ended."""
        loop, process = asyncio.get_running_loop(), lease.process

        def free(_: Future[Any]) -> None:
            if process.interrupted:
                process.kill()
            loop.call_soon_threadsafe(self._idle.put_nowait, process)

        if lease.last is None:
            self._idle.put_nowait(process)
        else:
            lease.last.add_done_callback(free)

    async def close(self) -> None:
        """End all processes; calls that still run fail, and so do later ones."""
        if self.closed:  # by another user of the same pool
            return
        self.closed = True
        for process in self._processes:
            await asyncio.to_thread(process.interrupt)
        idle = [self._idle.get_nowait() for _ in range(self._idle.qsize())]
        for process in idle:
            await asyncio.to_thread(process.kill)
            self._idle.put_nowait(process)  # a borrower that waits finds that all is closed
