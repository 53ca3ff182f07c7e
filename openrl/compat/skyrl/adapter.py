"""Plays SkyRL's environments in the process of their file."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from openrl.agents.base import Environment, Step
from openrl.agents.files import user_code
from openrl.agents.files.environments import EnvironmentAdapter
from openrl.types import Prompt
from openrl.waiting import maybe_await


class SkyRLAdapter(EnvironmentAdapter):
    def __init__(self, made: type) -> None:
        super().__init__(
            lambda prompt, sampling: SkyRLEnvironment(made, self.file.settings, self.file.max_turns)
        )


class SkyRLEnvironment(Environment):
    def __init__(self, made: type, settings: Mapping[str, Any], max_turns: int | None) -> None:
        self._class, self._settings = made, settings
        # its environments end an episode themselves, with the reward
        self._turns = {} if max_turns is None else {"max_turns": max_turns}
        self._game: Any = None

    async def reset(self, seed: int, prompt: Prompt) -> Sequence[Any]:
        config = importlib.import_module("omegaconf").DictConfig  # or our stand-in
        offered = {"env_config": config(self._settings), "extras": self._turns | prompt.meta}
        self._game = await user_code.construct(self._class, **offered)
        first, _ = await maybe_await(self._game.init(user_code.chat_for_clients(prompt)))
        return list(first)

    async def step(self, action: str) -> Step:
        found = await maybe_await(self._game.step(action))
        done = bool(found["done"])
        metrics = user_code.numbers(await maybe_await(self._game.get_metrics())) if done else {}
        return Step(
            list(found["observations"]),
            reward=user_code.scalar(found["reward"], "the reward"),
            done=done,
            metrics=metrics,
            state=None if found["observations"] else "",
        )

    async def close(self) -> None:
        if self._game is not None:
            await maybe_await(self._game.close())
