"""SkyRL's ``BaseTextEnv`` as an environment: ``init(prompt) -> (messages, metadata)`` and
``step(action) -> {"observations", "reward", "done", "metadata"}``. Runs in the file's process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrl.agents.base import Environment, Step
from openrl.agents.foreign.calls import chat_for_clients, construct, numbers, result, scalar
from openrl.agents.foreign.player import EnvironmentPlayer
from openrl.types import Prompt, Sampling


class SkyRLPlayer(EnvironmentPlayer):
    def make(self, sampling: Sampling) -> SkyRLEnvironment:
        return SkyRLEnvironment(self._class)


class SkyRLEnvironment(Environment):
    def __init__(self, made: type) -> None:
        self._class = made
        self._game: Any = None

    async def reset(self, seed: int, prompt: Prompt) -> Sequence[Any]:
        self._game = await construct(self._class, env_config={}, extras=dict(prompt.meta))
        first, _ = await result(self._game.init(chat_for_clients(prompt)))
        return list(first)

    async def step(self, action: str) -> Step:
        found = await result(self._game.step(action))
        done = bool(found["done"])
        metrics = numbers(await result(self._game.get_metrics())) if done else {}
        return Step(
            list(found["observations"]),
            reward=scalar(found["reward"], "the reward"),
            done=done,
            metrics=metrics,
            state=None if found["observations"] else "",
        )

    async def close(self) -> None:
        if self._game is not None:
            await result(self._game.close())
