"""Limits on the time of an episode or of a part of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from openrl.agents.conversation import EpisodeOver
from openrl.types import End


def deadline(seconds: float) -> AbstractAsyncContextManager[None]:
    """End the episode after this many seconds; 0 means never."""
    return within(seconds, EpisodeOver(End.TIMEOUT))


@asynccontextmanager
async def within(seconds: float, late: Exception) -> AsyncIterator[None]:
    """Cancel the block and raise ``late`` after this many seconds; 0 means never."""
    limit = asyncio.timeout(seconds or None)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise late from None
        raise


async def end_of(turns: Awaitable[End], seconds: float) -> End:
    """Give an episode this many seconds, and return how it ends, whether ``turns`` returns its end
    or raises ``EpisodeOver``."""
    try:
        async with deadline(seconds):
            return await turns
    except EpisodeOver as over:
        return over.end
