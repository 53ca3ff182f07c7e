"""Processes of one target, lent out for a single call or for all calls of an episode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from typing import Any

from openrl.errors import UserError
from openrl.processes.child import CallFailed, ChildProcess, Limits
from openrl.processes.worker import Target

Answerer = Callable[[Any], Coroutine[Any, Any, Any]]
"""Answers a question that the code asks during a call."""


class Lease:
    """A process lent to one borrower, who makes one call at a time."""

    def __init__(self, pool: ProcessPool, process: ChildProcess) -> None:
        self.process, self._pool = process, pool
        self.last: Future[Any] | None = None  # the most recent call

    async def call(
        self, value: Any, answerer: Answerer | None = None, timeout: float | None = None
    ) -> Any:
        """Send ``value`` to the target and return its result. ``timeout`` overrides that of the
        limits. Cancelling the call ends the process.

        Raises CallFailed, and UserError if the target does not load and has never loaded before."""
        loop = asyncio.get_running_loop()

        def answers(question: Any) -> Future[Any]:
            assert answerer is not None
            return asyncio.run_coroutine_threadsafe(answerer(question), loop)

        return await self._do(self.process.call, value, answerer and answers, timeout)

    async def start(self) -> None:
        """Start the process and load the target now, so that the first call need not wait for it.

        Raises the same errors as ``call``."""
        await self._do(self.process.ready)

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs, with the state that earlier calls left in it."""
        return self.process.is_running and not self.process.interrupted

    async def _do(self, blocking: Callable[..., Any], *arguments: Any) -> Any:
        self._pool.check_open()
        self.last = self._pool.threads.submit(blocking, *arguments)
        try:
            return await asyncio.wrap_future(self.last)
        except UserError as error:
            if self._pool.facts is None:
                raise
            # the target has loaded before, so it is this process that failed
            raise CallFailed(str(error)) from None
        except asyncio.CancelledError:
            if not self.last.cancelled():  # the call has begun
                self.process.interrupt()
            raise


class ProcessPool:
    """Up to ``size`` processes of one target, started only as concurrent calls need them.

    The number of threads in ``threads`` limits how many calls run at once. The time limit of a
    call does not start before the call does."""

    def __init__(
        self, target: Target, size: int, limits: Limits, kind: str, threads: Executor
    ) -> None:
        """``kind`` names the processes in messages."""
        self.kind, self.threads = kind, threads
        self._processes = [ChildProcess(target, limits, kind) for _ in range(size)]
        self._idle: asyncio.LifoQueue[ChildProcess] = asyncio.LifoQueue()
        self.closed = False
        for process in self._processes:
            self._idle.put_nowait(process)

    @property
    def facts(self) -> Any:
        """What the target says about itself; None before it has loaded."""
        return next((p.facts for p in self._processes if p.facts is not None), None)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Lease]:
        """Wait for a free process and lend it until the context ends. Raises CallFailed once the
        pool is closed."""
        lease = Lease(self, await self._idle.get())
        try:
            self.check_open()
            yield lease
        finally:
            self._release(lease)

    def check_open(self) -> None:
        """Raise CallFailed once the pool is closed."""
        if self.closed:
            raise CallFailed(f"the {self.kind} processes are closed")

    def _release(self, lease: Lease) -> None:
        """Return the process to the pool as soon as its last call has ended."""
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
        """End all processes. Calls that still run fail, and so do later ones."""
        if self.closed:  # another user of the pool has closed it
            return
        self.closed = True
        for process in self._processes:
            await asyncio.to_thread(process.interrupt)
        idle = [self._idle.get_nowait() for _ in range(self._idle.qsize())]
        for process in idle:
            await asyncio.to_thread(process.kill)
            self._idle.put_nowait(process)  # wakes a waiting borrower, who finds the pool closed
