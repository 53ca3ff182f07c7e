"""Waiting for several things at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def all_or_first_error(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of all; the first failure cancels the rest and is raised as it is, not in a
    group."""
    tasks = [asyncio.create_task(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancelled(tasks)


async def result_beside(work: Awaitable[Result], others: Iterable[asyncio.Future[Any]]) -> Result:
    """The result of ``work``. The error of another task ends it at once and is raised; the others
    run on."""
    task = asyncio.ensure_future(work)
    watched: set[asyncio.Future[Any]] = {task, *others}
    try:
        while not task.done():
            done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for other in done:
                other.result()  # raises its error
        return task.result()
    finally:
        await cancelled([task])


async def cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel what still runs, and wait for its end; errors of what was cancelled are nobody's any
    more."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
