"""A limit on the time of an episode or of a part of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from openrl.agents.conversation import EpisodeOver
from openrl.types import End


def deadline(seconds: float) -> AbstractAsyncContextManager[None]:
    """Ends the episode after so many seconds; 0: never."""
    return within(seconds, EpisodeOver(End.TIMEOUT))


@asynccontextmanager
async def within(seconds: float, late: Exception) -> AsyncIterator[None]:
    """Gives up and raises ``late`` after so many seconds; 0: never."""
    limit = asyncio.timeout(seconds or None)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise late from None
        raise


async def end_of(turns: Awaitable[End], seconds: float) -> End:
    """How an episode ends that has so many seconds, ``EpisodeOver`` included."""
    try:
        async with deadline(seconds):
            return await turns
    except EpisodeOver as over:
        return over.end
