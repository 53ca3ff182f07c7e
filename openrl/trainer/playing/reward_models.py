"""The reward models of a run as sources of rewards: they complete the scores of groups while others
are still being generated."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

from torch import Tensor

from openrl.rewards.combined import Weighing
from openrl.rewards.protocol import Failure
from openrl.types import Group, Score, Trajectory

Forward = Callable[[list[Group], int], Awaitable[Tensor]]
"""``await forward(groups, model)``: what one of the models says of every trajectory, (rows,)."""


class RewardModels:
    """Scores what has come while the models were busy in one call, as a database commits groups of
    transactions: the ranks of a model must meet in the same call, so one runs at a time."""

    def __init__(self, weighing: Weighing, forward: Forward, most: int | None = None) -> None:
        """``most`` groups a call; with 1 the numbers do not depend on which groups came
        together."""
        self.weighing, self.forward, self.most = weighing, forward, most
        self.names = [source.name for source in weighing.plan.sources if source.kind == "model"]
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

    async def score(self, groups: list[Group]) -> None:
        """Add to each row's score what the models of its data source say; to greedy answers too.

        The engines' side may have scored a row by other sources, or failed to. Raises UserError for
        a reward that is not finite, if that is to stop the run."""
        rows = [t for g in groups for t in g.answers]
        for row in rows:
            row.score = row.score or Score(0.0)
        for model, name in enumerate(self.names):
            asked = [
                row
                for row in rows
                if name in self.weighing.plan.of(row.prompt.source) and not _failed(row)
            ]
            if asked:
                # what a model sees of several segments is the last: the end of the trajectory
                last = [replace(row, segments=row.segments[-1:]) for row in asked]
                values = await self.forward([Group(row.prompt, [row]) for row in last], model)
                for row, value in zip(asked, values.tolist(), strict=True):
                    row.score = self._with(row, name, value)

    def _with(self, row: Trajectory, name: str, value: float) -> Score:
        if not math.isfinite(value):
            return self.weighing.fail(row, name, Failure(f"the model's output is {value}"))
        assert row.score is not None
        return self.weighing.add(
            row.score, name, self.weighing.plan.of(row.prompt.source)[name], Score(value)
        )


def _failed(row: Trajectory) -> bool:
    return row.failed or (row.score is not None and row.score.failure is not None)
