"""Helpers to wait for several tasks at once, and to compute together what several tasks ask for."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Sequence,
)
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Job = TypeVar("Job")
Result = TypeVar("Result")


async def all_or_first_error(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return the results of all coroutines. The first failure cancels the rest and is raised
    unchanged, not in an exception group."""
    tasks = [asyncio.create_task(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def maybe_await(value: Any) -> Any:
    """Return the result of a function that may be a coroutine."""
    if not inspect.isawaitable(value):
        return value
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # there is none in ``drive``
        return await _Awaited(value)
    return await value


class _Awaited:
    """What ``drive`` is asked to wait for."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __await__(self) -> Generator[_Awaited, Any, Any]:
        return (yield self)


def drive(coroutine: Coroutine[Any, Any, Any], run: Callable[[Any], Any]) -> Any:
    """Return the result of a coroutine that awaits nothing but ``maybe_await``. What it awaits
    there goes to ``run``, which has an event loop; the functions that it calls run outside of any,
    so they may run loops of their own."""
    step: Callable[[], Any] = partial(coroutine.send, None)
    while True:
        try:
            awaited = step()
        except StopIteration as end:
            return end.value
        try:
            step = partial(coroutine.send, run(_wait_for(awaited.value)))
        except BaseException as error:
            step = partial(coroutine.throw, error)


async def _wait_for(value: Any) -> Any:
    return await value


async def result_beside(work: Awaitable[Result], others: Iterable[asyncio.Future[Any]]) -> Result:
    """Return the result of ``work``. If one of ``others`` fails first, cancel the work and raise
    that error. The others are not cancelled."""
    task = asyncio.ensure_future(work)
    watched: set[asyncio.Future[Any]] = {task, *others}
    try:
        while not task.done():
            done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for other in done:
                other.result()  # raises its error
        return task.result()
    finally:
        await cancel_all([task])


async def in_order(
    jobs: Iterable[Job], work: Callable[[Job], Awaitable[Result]], width: int
) -> AsyncIterator[Result]:
    """Yield the result of ``work`` for each job, in the order of the jobs. At most ``width`` jobs
    run or wait to be taken at a time.

    The first error ends the iteration and cancels the jobs that still run.
    """
    running: deque[asyncio.Task[Result]] = deque()
    try:
        for job in jobs:
            if len(running) == width:
                yield await running.popleft()
            running.append(asyncio.ensure_future(work(job)))
        while running:
            yield await running.popleft()
    finally:
        await cancel_all(running)


async def in_daemon(work: Callable[..., Result], *args: Any) -> Result:
    """Return ``work(*args)``, done in a thread. Unlike that of ``asyncio.to_thread`` it holds up
    nothing if this call is cancelled: neither the end of the event loop nor that of the process."""
    done: Future[Result] = Future()
    done.set_running_or_notify_cancel()  # or its wait, when cancelled, would cancel it

    def run() -> None:
        try:
            done.set_result(work(*args))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks that still run and wait until they end. Errors of all tasks are
    discarded."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Batcher(Generic[Item, Result]):
    """Computes the items of concurrent calls in batches, in the order in which they came.

    A batch holds at most ``most`` items, or items of that ``size`` together, but always one. At
    most ``width`` batches run at a time; what comes meanwhile waits for the next one. If a batch
    fails, the calls in it fail, and no others. A call that is cancelled takes its items along,
    unless their batch runs."""

    def __init__(
        self,
        run: Callable[[list[Item]], Awaitable[Sequence[Result]]],
        *,
        most: float,
        width: int = 1,
        wait: float | None = None,
        size: Callable[[Item], int] = lambda item: 1,
    ) -> None:
        """``run`` returns the results of a batch. A batch that is not full starts after ``wait``
        seconds; None: at once, with what is there, before the call returns to the event loop."""
        self._run, self._most, self._width = run, most, width
        self._wait, self._size = wait, size
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Return the number of items that wait."""
        return len(self._waiting)

    async def __call__(self, items: Sequence[Item]) -> list[Result]:
        """Return the results in the order of ``items``. Raises whatever ``run`` raised."""
        futures = [asyncio.get_running_loop().create_future() for _ in items]
        self._waiting.extend(zip(items, futures, strict=True))
        self._start()
        return await asyncio.gather(*futures)  # cancelled with the call

    def _start(self, full: bool = False) -> None:
        """Start the batches that may run now. ``full``: take what is there for a full batch."""
        while self._waiting and len(self._running) < self._width:
            if self._wait is not None and not full and len(self._waiting) < self._most:
                loop = asyncio.get_running_loop()
                self._timer = self._timer or loop.call_later(self._wait, self._start, True)
                return
            self._stop_timer()
            if batch := self._take():
                # in a task of its own, so that cancelling a call does not affect the others
                task = asyncio.create_task(self._compute(batch))
                self._running.add(task)
                task.add_done_callback(self._end)
            full = False

    def _take(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        batch: list[tuple[Item, asyncio.Future[Result]]] = []
        room = self._most
        while self._waiting:
            item, future = self._waiting[0]
            if not future.done():  # or else its caller has gone
                room -= self._size(item)
                if batch and room < 0:
                    break
                batch.append((item, future))
            self._waiting.popleft()
        return batch

    async def _compute(self, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results = await self._run([item for item, _ in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"{len(results)} results for {len(batch)} items")
        except asyncio.CancelledError:  # by ``close``
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(result)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def close(self) -> None:
        """Cancel the calls that wait, and those whose batch runs."""
        self._stop_timer()
        for _, future in self._waiting:
            future.cancel()
        self._waiting.clear()
        await cancel_all(self._running)
