"""Helpers to wait for several tasks at once."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

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
