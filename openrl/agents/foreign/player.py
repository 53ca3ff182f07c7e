"""Plays a user's file in its process, one episode after the other. This module uses the standard
library only."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrl.agents.foreign.calls import Call, Facts
from openrl.agents.foreign.recognise import (
    EXECUTOR,
    GYM,
    PROGRAM,
    SKYRL,
    TRL,
    AgentClass,
    find_class,
)
from openrl.agents.foreign.shims import install_shims
from openrl.processes.worker import AskParent, Loaded, load_module
from openrl.types import Prompt, Sampling

_MAY_REWARD = ("agent", "program")  # kinds of classes that may or may not give rewards


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
        found = find_class(load_module(self.path, "agent_file"), self.class_name)
        name, made = found.kind.name, found.made
        if found.kind is TRL:
            from openrl.agents.foreign.tools import ToolPlayer

            tools = ToolPlayer(made)
            rewarding = hasattr(made, "get_reward")
            return Loaded(tools.call, Facts(name, made.__name__, tools.schemas, rewarding))
        rewards = None if name in _MAY_REWARD else True
        return Loaded(Player(found).call, Facts(name, made.__name__, rewards=rewards))


class Player:
    """Plays the episodes of a class. ``calls.Call`` names its methods."""

    def __init__(self, found: AgentClass) -> None:
        self._found = found
        self._runner = asyncio.Runner()  # one event loop, which the file's objects may be tied to
        self._playing: Any = None  # the environment of an episode, or the player of all episodes

    def call(self, asked: Call, ask: AskParent) -> Any:
        return self._runner.run(getattr(self, asked.method)(*asked.arguments, ask))

    async def reset(
        self, seed: int, prompt: Prompt, sampling: Sampling, ask: AskParent
    ) -> tuple[Any, Mapping[str, str]]:
        """Begin an episode. Return the first observation, and how metrics are reduced."""
        seed_everything(seed)
        self._playing = _make_environment(self._found, sampling)
        return await self._playing.reset(seed, prompt), self._playing.reductions

    async def step(self, action: str, ask: AskParent) -> tuple[Any, Mapping[str, str]]:
        return await self._playing.step(action), self._playing.reductions

    async def frame(self, ask: AskParent) -> Any:
        return await self._playing.frame()

    async def close(self, ask: AskParent) -> None:
        playing, self._playing = self._playing, None
        await playing.close()

    async def prepare(self, ask: AskParent) -> None:
        """Prepare an executor or a program before its episodes."""
        if self._playing is None:
            playing = await _make_player(self._found)
            await playing.prepare(ask)
            self._playing = playing

    async def play(self, prompt: Prompt, *rest: Any) -> Any:
        """Play a whole episode."""
        return await self._playing.play(prompt, *rest)


def seed_everything(seed: int) -> None:
    """Seed the global random generators, so that code which uses them draws the same numbers in
    every sibling."""
    random.seed(seed)
    for name, setter in {"numpy": "random.seed", "torch": "manual_seed"}.items():
        module: Any = sys.modules.get(name)
        for part in setter.split(".") if module else ():
            module = getattr(module, part)
        if module is not None:
            module(seed)


def _make_environment(found: AgentClass, sampling: Sampling) -> Any:
    """Make the environment of an episode. Each kind is imported only where it is played."""
    if found.kind is GYM:
        from openrl.agents.gym import GymEnvironment

        return GymEnvironment(found.made())
    if found.kind is SKYRL:
        from openrl.agents.foreign.skyrl import SkyRLEnvironment

        return SkyRLEnvironment(found.made)
    from openrl.agents.foreign.text_turns import TextTurns

    return TextTurns(found.made, sampling)


async def _make_player(found: AgentClass) -> Any:
    from openrl.agents.foreign.text_turns import construct

    if found.kind is EXECUTOR:
        from openrl.agents.foreign.executor import Executor

        return Executor(await construct(found.made))
    assert found.kind is PROGRAM
    from openrl.agents.foreign.program import Program

    return Program(found.made)
