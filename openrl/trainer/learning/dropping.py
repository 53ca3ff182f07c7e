"""Dropping a training step: until its first optimizer step, a step that is asked to stop can be
forgotten, and a resumed run takes it again from the same answers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

PIECE_S = 2.0  # seconds of work between two looks at whether the run is asked to stop


class StepDropped(Exception):
    """The run was asked to stop before the first optimizer step of a training step."""


class DropPoint:
    """The point of one training step up to which it can be dropped: its first optimizer step.
    ``stops`` returns whether the run is asked to stop."""

    def __init__(self, stops: Callable[[], Awaitable[bool]]) -> None:
        self._stops = stops
        self._passed_at: float | None = None

    async def check(self) -> None:
        """Raise StepDropped if the run is asked to stop and the step can still be dropped. Call it
        before each piece of work."""
        if not self.passed and await self._stops():
            raise StepDropped

    @property
    def passed(self) -> bool:
        """Whether the first optimizer step was taken or begun: from there the step is finished."""
        return self._passed_at is not None

    def passes(self) -> None:
        """Record that the next piece of work ends with an optimizer step."""
        if self._passed_at is None:
            self._passed_at = time.monotonic()

    @property
    def seconds_since(self) -> float:
        """Seconds since the first optimizer step; 0 before it."""
        return 0.0 if self._passed_at is None else time.monotonic() - self._passed_at


def next_count(count: int, seconds: float) -> int:
    """Return how many micro-batches the next piece should have, after ``count`` took ``seconds``:
    about PIECE_S of work, and not suddenly much more."""
    return max(1, min(4 * count, int(count * PIECE_S / max(seconds, 1e-3))))
