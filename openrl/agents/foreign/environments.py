"""Environments of files as ours, and what plays them in the file's process.

gym        reset(seed), step(action), as in ``openrl.agents.environments.gym``
OpenRLHF   step(states) -> {"rewards", "environment_feedback", "done", "scores"?, "extra_logs"?,
           "sampling_params"?, "images"?}
Molt       step(state) -> Result(reward, observation, terminated, truncated, info, score, images)
SkyRL      init(prompt) -> (messages, metadata),
           step(action) -> {"observations", "reward", "done", "metadata"}

The ``reset`` and ``step`` of OpenRLHF and Molt take dicts, and texts are concatenated as they
are."""

from __future__ import annotations

import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from openrl.agents.base import Environment, Step
from openrl.agents.foreign import user_code
from openrl.agents.foreign.player import Player
from openrl.types import Prompt, Sampling

if TYPE_CHECKING:
    from openrl.vision.parts import Content

IGNORED = "sampling_params_ignored"  # metric: turns that asked for other sampling values


class EnvironmentPlayer(Player, ABC):
    rewards = True
    _environment: Any = None  # that of the episode

    @abstractmethod
    def make(self, prompt: Prompt, sampling: Sampling) -> Any:
        """Return a new environment."""

    async def reset(
        self, seed: int, prompt: Prompt, sampling: Sampling
    ) -> tuple[Any, Mapping[str, str]]:
        """Begin an episode. Return the first observation, and how metrics are reduced."""
        self._environment = None  # the last episode's is closed, also if there is no other
        seed_everything(seed)
        self._environment = self.make(prompt, sampling)
        return await self._environment.reset(seed, prompt), self._environment.reductions

    async def step(self, action: str) -> tuple[Any, Mapping[str, str]]:
        return await self._environment.step(action), self._environment.reductions

    async def frame(self) -> Any:
        return await self._environment.frame()

    async def close(self) -> None:
        if self._environment is not None:
            await self._environment.close()


class GymPlayer(EnvironmentPlayer):
    def make(self, prompt: Prompt, sampling: Sampling) -> Any:
        from openrl.agents.environments.gym import GymEnvironment

        return GymEnvironment(self._class())


def seed_everything(seed: int) -> None:
    """Seed the global random generators, which then draw the same numbers in every sibling."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


# -- OpenRLHF and Molt -----------------------------------------------------------------------------


class TurnsPlayer(EnvironmentPlayer):
    def make(self, prompt: Prompt, sampling: Sampling) -> TextTurns:
        return TextTurns(self._class, sampling)


class TextTurns(Environment):
    def __init__(self, made: type, sampling: Sampling) -> None:
        self._class, self._sampling = made, user_code.sampling_values(sampling)
        self._agent: Any = None
        self.reductions: dict[str, str] = {IGNORED: "sum"}  # the class's own take the last step

    async def reset(self, seed: int, prompt: Prompt) -> Content:
        self._agent = await user_code.construct(self._class)
        self._label = prompt.label
        states = {"observation": prompt.text, "prompt": prompt.text, "label": prompt.label}
        if prompt.images:
            states["images"] = user_code.pictures(prompt)
        seeded = {"seed": seed} if user_code.takes(self._agent.reset, "seed") else {}
        found = await user_code.result(self._agent.reset(states, **seeded))
        self._text = _text(_value(found, "observation", "reset"))
        return _content(self._text, [placed.image.data for placed in prompt.images])

    async def step(self, action: str) -> Step:
        states = {
            "observation_text": self._text,
            "action_text": action,
            "label": self._label,
            "sampling_params": SimpleNamespace(**self._sampling),
        }
        found = await user_code.result(self._agent.step(states))
        told = found if isinstance(found, Mapping) else _as_told(found)
        text = _text(_value(told, "environment_feedback", "step"))
        asked = told.get("sampling_params")
        changed = asked is not None and any(
            getattr(asked, name, value) != value for name, value in self._sampling.items()
        )
        self._text += action + text
        reward = user_code.scalar(_value(told, "rewards", "step"), "the reward")
        metrics = user_code.numbers(told.get("extra_logs"))
        self.reductions.update(dict.fromkeys(metrics, "last"))
        return Step(
            _content(text, told.get("images")),
            reward=reward,
            done=bool(_value(told, "done", "step")),
            truncated=bool(getattr(found, "truncated", False)),
            passed=user_code.verdict(told.get("scores"), reward),
            metrics={**metrics, IGNORED: float(changed)},
        )

    async def close(self) -> None:
        if self._agent is not None and (close := getattr(self._agent, "close", None)):
            await user_code.result(close())


def _as_told(found: Any) -> dict[str, Any]:
    """Return Molt's Result in OpenRLHF's form."""
    return {
        "rewards": found.reward,
        "environment_feedback": found.observation,
        "done": found.terminated,
        "scores": found.reward if found.score is None else found.score,
        "extra_logs": found.info,
        "sampling_params": found.sampling_params,
        "images": found.images,
    }


def _content(text: str, images: Any) -> Content:
    """Return an observation. The text has the marks of its images, whose parts follow it."""
    shown = [{"type": "image", "image": image} for image in images or ()]
    return [{"type": "text", "text": text}, *shown] if shown else text


def _value(found: Any, key: str, method: str) -> Any:
    if not isinstance(found, Mapping) or key not in found:
        raise TypeError(f"{method} must return a dict with {key!r}")
    return found[key]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"an observation must be text, not {type(value).__name__}")
    return value


# -- SkyRL -----------------------------------------------------------------------------------------


class SkyRLPlayer(EnvironmentPlayer):
    def make(self, prompt: Prompt, sampling: Sampling) -> SkyRLEnvironment:
        return SkyRLEnvironment(self._class)


class SkyRLEnvironment(Environment):
    def __init__(self, made: type) -> None:
        self._class = made
        self._game: Any = None

    async def reset(self, seed: int, prompt: Prompt) -> Sequence[Any]:
        self._game = await user_code.construct(self._class, env_config={}, extras=dict(prompt.meta))
        first, _ = await user_code.result(self._game.init(user_code.chat_for_clients(prompt)))
        return list(first)

    async def step(self, action: str) -> Step:
        found = await user_code.result(self._game.step(action))
        done = bool(found["done"])
        metrics = (
            user_code.numbers(await user_code.result(self._game.get_metrics())) if done else {}
        )
        return Step(
            list(found["observations"]),
            reward=user_code.scalar(found["reward"], "the reward"),
            done=done,
            metrics=metrics,
            state=None if found["observations"] else "",
        )

    async def close(self) -> None:
        if self._game is not None:
            await user_code.result(self._game.close())
