"""When rollouts and updates happen relative to each other. Standard library only.

A schedule drives whatever has the two stages of a step: the trainer of a run, or the model of one
in ``benchmarks/simulate_placement.py``. It knows nothing of what they do."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from openrl.trainer.waiting import cancelled, result_beside

Rollout = TypeVar("Rollout")
Report = TypeVar("Report", covariant=True)


class Stages(Protocol[Rollout, Report]):
    """The stages of one step: how they are done, never when."""

    async def collect(self, step: int) -> Rollout:
        """Prompts -> answers, by the weights that the engines hold. Draws its prompts before it
        first waits."""

    async def learn(self, rollout: Rollout, step: int) -> Report:
        """Answers -> optimizer steps -> new weights in the engines."""


class Schedule(Protocol):
    def run(self, stages: Stages[Any, Report], steps: range) -> AsyncGenerator[Report]:
        """The report of each step, when it has been learnt. Closing the generator leaves no task
        behind."""


@dataclass(frozen=True)
class OnPolicy:
    """Collect, then learn: every token is trained by the policy that sampled it."""

    async def run(self, stages: Stages[Any, Report], steps: range) -> AsyncGenerator[Report]:
        for step in steps:
            rollout = await stages.collect(step)
            yield await stages.learn(rollout, step)


@dataclass(frozen=True)
class RunAhead:
    """Collect up to ``max_lag`` steps ahead: sampling overlaps training, and long answers the short
    ones of the next rollout.

    The rollout of a step begins once the step ``max_lag + 1`` before it has been learnt and its
    weights are sent, so whatever is trained is at most ``max_lag`` weight versions old, in whatever
    order answers end. Rollouts begin, and are learnt, in the order of their steps. The first error
    of any stage ends all others and is raised."""

    max_lag: int

    async def run(self, stages: Stages[Any, Report], steps: range) -> AsyncGenerator[Report]:
        begun: deque[asyncio.Task[Any]] = deque()
        following = iter(steps)
        try:
            for step in steps:
                while len(begun) <= self.max_lag and (ahead := next(following, None)) is not None:
                    begun.append(
                        asyncio.create_task(stages.collect(ahead), name=f"collect {ahead}")
                    )
                rollout = await result_beside(begun[0], begun)
                begun.popleft()
                yield await result_beside(stages.learn(rollout, step), begun)
        finally:
            await cancelled(begun)
