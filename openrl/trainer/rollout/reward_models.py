"""Reward models as reward sources: they score groups while others are still generated."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

from torch import Tensor

from openrl.rewards.combined import RewardCombiner
from openrl.types import PromptGroup, Score, Trajectory
from openrl.waiting import Batcher

Forward = Callable[[list[PromptGroup], int], Awaitable[Tensor]]
"""``await forward(groups, model)`` returns one model's output for every trajectory, (rows,)."""


class RewardModels:
    """Scores groups with the reward models. All ranks of a model must join every call, so one call
    runs at a time; the groups that arrive meanwhile are scored together in the next one."""

    def __init__(self, combiner: RewardCombiner, forward: Forward, most: int | None = None) -> None:
        """``most`` limits the groups per call; 1: scores do not depend on what arrives together."""
        self.combiner, self.forward = combiner, forward
        self.names = [source.name for source in combiner.plan.sources if source.kind == "model"]
        self._batcher = Batcher(self.score, most=most or math.inf)

    async def __call__(self, group: PromptGroup) -> None:
        """Score a group, together with others that are waiting."""
        await self._batcher([group])

    async def close(self) -> None:
        """Cancel all calls."""
        await self._batcher.close()

    async def score(self, groups: list[PromptGroup]) -> list[PromptGroup]:
        """Add the outputs of the models for a row's data source to its score. This includes greedy
        answers. Returns the groups.

        The rollout worker may already have scored a row by other sources, or have failed to. Raises
        UserError for a reward that is not finite, if that is to stop the run."""
        rows = [t for g in groups for t in g.answers]
        for row in rows:
            row.score = row.score or Score(0.0)
        plan = self.combiner.plan
        for model, name in enumerate(self.names):
            # a row may fail by one model and is then not shown to the next
            sound = [r for r in rows if not (r.failed or (r.score and r.score.failure is not None))]
            requested = [row for row in sound if name in plan.of(row.prompt.source)]
            if requested:
                # of several segments a model sees the last, which has the end of the trajectory
                last = [replace(row, segments=row.segments[-1:]) for row in requested]
                values = await self.forward([PromptGroup(row.prompt, [row]) for row in last], model)
                for row, value in zip(requested, values.tolist(), strict=True):
                    row.score = self._add_output(row, name, value)
        return groups

    def _add_output(self, row: Trajectory, name: str, value: float) -> Score:
        if not math.isfinite(value):
            failed = Score.failed(f"{name}: the model's output is {value}")
            return self.combiner.apply_policy(row, failed)
        assert row.score is not None
        weight = self.combiner.plan.of(row.prompt.source)[name]
        return self.combiner.add(row.score, name, weight, Score(value))
