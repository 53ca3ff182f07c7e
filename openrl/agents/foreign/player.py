"""Plays a user's file in its process, one episode after the other. This module uses the standard
library only."""

from __future__ import annotations

import asyncio
import importlib
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrl.agents.foreign.calls import Call, Facts
from openrl.agents.foreign.recognise import find_class
from openrl.agents.foreign.shims import install_shims
from openrl.processes.worker import AskParent, Loaded, load_module
from openrl.types import Prompt, Sampling


@dataclass(frozen=True)
class AgentFile:
    """A Python file and the name of the class in it; None means one of a known kind."""

    path: Path  # absolute
    class_name: str | None = None

    def __str__(self) -> str:
        return f"--agent_func_path {self.path}" + (f":{self.class_name}" if self.class_name else "")

    def load(self) -> Loaded:
        """Load the file. What it says about itself is a ``Facts``."""
        install_shims()
        made, kind = find_class(load_module(self.path, "agent_file"), self.class_name)
        module, _, name = kind.player.partition(".")
        # imported only now, because a kind may need large libraries
        home = importlib.import_module(f"openrl.agents.foreign.{module}")
        player: Player = getattr(home, name)(made)
        facts = Facts(kind.name, made.__name__, player.schemas, player.rewards)
        return Loaded(player.call, facts)


class Player:
    """Plays the episodes of a class. ``Call`` names a method of a subclass; this class alone stands
    for an agent that plays in the engine's process."""

    schemas: Sequence[Mapping[str, Any]] = ()  # of its tools
    rewards: bool | None = None  # whether it gives rewards; None: this shows only when it plays
    ask: AskParent

    def __init__(self, made: Any) -> None:
        self._class = made
        self._runner = asyncio.Runner()  # one event loop, which the file's objects may be tied to

    def call(self, asked: Call, ask: AskParent) -> Any:
        self.ask = ask
        return self._runner.run(getattr(self, asked.method)(*asked.arguments))


class EnvironmentPlayer(Player):
    rewards = True
    _environment: Any = None  # that of the episode

    def make(self, sampling: Sampling) -> Any:
        """Return a new environment."""
        raise NotImplementedError

    async def reset(
        self, seed: int, prompt: Prompt, sampling: Sampling
    ) -> tuple[Any, Mapping[str, str]]:
        """Begin an episode. Return the first observation, and how metrics are reduced."""
        self._environment = None  # the last episode's is closed, also if there is no other
        seed_everything(seed)
        self._environment = self.make(sampling)
        return await self._environment.reset(seed, prompt), self._environment.reductions

    async def step(self, action: str) -> tuple[Any, Mapping[str, str]]:
        return await self._environment.step(action), self._environment.reductions

    async def frame(self) -> Any:
        return await self._environment.frame()

    async def close(self) -> None:
        if self._environment is not None:
            await self._environment.close()


class GymPlayer(EnvironmentPlayer):
    def make(self, sampling: Sampling) -> Any:
        from openrl.agents.gym import GymEnvironment

        return GymEnvironment(self._class())


def seed_everything(seed: int) -> None:
    """Seed the global random generators, so that code which uses them draws the same numbers in
    every sibling."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
