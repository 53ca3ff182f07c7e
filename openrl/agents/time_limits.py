"""Limits on the time of episodes, turns and calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from openrl.agents.conversation import EpisodeOver
from openrl.types import FinishReason


def deadline(seconds: float) -> AbstractAsyncContextManager[None]:
    """End the episode after this many seconds; 0 means never."""
    return time_limit(seconds, EpisodeOver(FinishReason.TIMEOUT))


@asynccontextmanager
async def time_limit(seconds: float, late: Exception) -> AsyncIterator[None]:
    """Cancel the block and raise ``late`` after this many seconds; 0 means never."""
    limit = asyncio.timeout(seconds or None)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise late from None
        raise
