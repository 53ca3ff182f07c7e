"""The end of what an episode holds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def closing(close: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Closes on every way out. What failed first counts: a ``close`` that fails as well hides
    neither a cancellation nor the reason why the episode failed."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            await close()
        raise
    await close()
