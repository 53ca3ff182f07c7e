"""Plays environments of files in the file's process."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

from openrl.agents.base import Environment
from openrl.agents.files.adapter import Adapter
from openrl.types import Image, Prompt, Sampling
from openrl.waiting import drive

MakeEnvironment = Callable[[Prompt, Sampling], Environment]


class EnvironmentAdapter(Adapter):
    """Each episode has a new environment."""

    rewards = True
    _environment: Any = None  # that of the episode

    def __init__(self, make: MakeEnvironment) -> None:
        super().__init__(None)
        self._make = make

    def result(self, value: Any) -> Any:
        return drive(value, self._runner.run) if inspect.iscoroutine(value) else value

    async def reset(
        self, seed: int, prompt: Prompt, sampling: Sampling
    ) -> tuple[Any, Mapping[str, str]]:
        """Begin an episode. Return the first observation, and how metrics are reduced."""
        self._environment = None  # drop the previous environment even if the next cannot be made
        seed_everything(seed)
        self._environment = self._make(prompt, sampling)
        return await self._environment.reset(seed, prompt), self._environment.reductions

    async def step(self, action: str) -> tuple[Any, Mapping[str, str]]:
        return await self._environment.step(action), self._environment.reductions

    async def frame(self) -> Image | None:
        return await self._environment.frame()

    async def close(self) -> None:
        if self._environment is not None:
            await self._environment.close()


def adapt_gym(made: type) -> EnvironmentAdapter:
    # classes of other interfaces do not need PIL
    from openrl.agents.environments.gym import GymEnvironment

    return EnvironmentAdapter(lambda prompt, sampling: GymEnvironment(made()))


def seed_everything(seed: int) -> None:
    """Seed the global random generators, which then draw the same numbers in every sibling."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
