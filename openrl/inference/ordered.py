"""Work that runs concurrently and comes back in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

from openrl.waiting import cancel_all

Job = TypeVar("Job")
Result = TypeVar("Result")


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
