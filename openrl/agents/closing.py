"""Closes what an episode holds."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

log = logging.getLogger(__name__)


@asynccontextmanager
async def closing(close: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Call ``close`` on every way out of the context. The first error counts: if ``close`` fails as
    well, it hides neither a cancellation nor the reason why the episode failed."""
    try:
        yield
    except BaseException:
        try:
            await close()
        except Exception:
            log.warning("what an episode held could not be closed either", exc_info=True)
        raise
    await close()
