"""Scoring groups by a model while other groups are still being generated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from openrl.types import Group


class ArrivalJudge:
    """Scores what has arrived while the model was busy in one call, as a database commits groups of
    transactions.

    ``score(groups)`` fills in the scores; one call runs at a time, since the ranks of a model must
    meet in the same one. ``most`` is the most groups of a call: with 1 the numbers do not depend on
    which groups arrived together."""

    def __init__(
        self, score: Callable[[list[Group]], Awaitable[None]], most: int | None = None
    ) -> None:
        self.score, self.most = score, most
        self._waiting: dict[int, Group] = {}
        self._turn = asyncio.Lock()

    async def __call__(self, group: Group) -> None:
        """Returns once the group has its scores."""
        self._waiting[id(group)] = group
        async with self._turn:
            while id(group) in self._waiting:
                batch = list(self._waiting.values())[: self.most]
                await self.score(batch)
                for scored in batch:
                    del self._waiting[id(scored)]
