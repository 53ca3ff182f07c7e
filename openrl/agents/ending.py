"""How an episode ends: in time, and with everything closed that it holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from openrl.agents.conversation import EpisodeOver
from openrl.types import FinishReason

log = logging.getLogger(__name__)


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


async def episode_end(turns: Awaitable[FinishReason], seconds: float) -> FinishReason:
    """Give an episode this many seconds, and return its end, which ``turns`` returns or raises."""
    try:
        async with deadline(seconds):
            return await turns
    except EpisodeOver as over:
        return over.finish_reason


@asynccontextmanager
async def close_on_exit(close: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Call ``close`` on every way out of the context. The first error counts: if ``close`` fails as
    well, it hides neither a cancellation nor the reason why the episode failed."""
    try:
        yield
    except BaseException:
        try:
            await close()
        except Exception:
            log.warning("an episode failed, and so did closing its resources", exc_info=True)
        raise
    await close()
