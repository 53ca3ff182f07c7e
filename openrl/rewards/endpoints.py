"""Which of several URLs to ask next: in turn, the healthy ones; one that failed rests before it is
asked again."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

FIRST_PAUSE, GROWTH, LONGEST_PAUSE = (
    1.0,
    4.0,
    60.0,
)  # seconds: 1, 4, 16, 60: five attempts outlast a minute
JITTER = 0.25  # a pause is up to this share longer, so that clients do not come back in step


@dataclass
class Endpoint:
    url: str
    failures: int = 0  # in a row
    resting_until: float = 0.0  # on the clock


@dataclass
class Endpoints:
    """Rotation over URLs. Clock, sleep and the dice of the jitter can be replaced."""

    urls: list[str]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    dice: Callable[[], float] = random.random
    all: list[Endpoint] = field(init=False)

    def __post_init__(self) -> None:
        self.all = [Endpoint(url) for url in self.urls]

    async def next(self) -> Endpoint:
        """The healthy URL whose turn it is; if all rest, the one that is ready first, once it
        is."""
        ready = min(
            self.all, key=lambda e: max(0.0, e.resting_until - self.clock())
        )  # the first of equals
        self.all.remove(ready)
        self.all.append(ready)
        while (pause := ready.resting_until - self.clock()) > 0:
            await self.sleep(pause)
        return ready

    def succeeded(self, endpoint: Endpoint) -> None:
        endpoint.failures, endpoint.resting_until = 0, 0.0

    def failed(self, endpoint: Endpoint, started: float, retry_after: float | None = None) -> None:
        """A request that ``started`` then failed. Requests that were under way together count
        once."""
        if started >= endpoint.resting_until:
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * GROWTH**endpoint.failures) * (
                1 + JITTER * self.dice()
            )
            endpoint.failures += 1
            endpoint.resting_until = self.clock() + pause
        if retry_after is not None:
            endpoint.resting_until = self.clock() + min(retry_after, 2 * LONGEST_PAUSE)


def retry_after_seconds(header: str | None, now: float) -> float | None:
    """A Retry-After header, seconds or a date (RFC 9110 section 10.2.3); ``now`` in seconds since
    1970."""
    if header is None:
        return None
    try:
        return max(
            0.0,
            (
                float(header)
                if header.strip().isdigit()
                else parsedate_to_datetime(header).timestamp() - now
            ),
        )
    except ValueError:
        return None
