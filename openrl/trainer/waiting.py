"""Waiting for several things at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def all_or_first_error(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of all; the first failure cancels the rest and is raised as it is, not in a group."""
    tasks = [asyncio.create_task(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
