"""OpenRLHF's ``AgentInstance`` and Molt's ``Env`` as an environment. Their ``reset`` and ``step``
take dicts, and texts are concatenated as they are. Runs in the file's process.

OpenRLHF  step(states) -> {"rewards", "environment_feedback", "done", "scores"?, "extra_logs"?,
          "sampling_params"?, "images"?}
Molt      step(state) -> Result(reward, observation, terminated, truncated, info, score, images)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from openrl.agents.base import Environment, Step
from openrl.agents.foreign.calls import (
    construct,
    numbers,
    pictures,
    result,
    sampling_values,
    scalar,
    takes,
    verdict,
)
from openrl.types import Prompt, Sampling

if TYPE_CHECKING:
    from openrl.vision.parts import Content

IGNORED = "sampling_params_ignored"  # metric: turns that asked for other sampling values


class TextTurns(Environment):
    def __init__(self, made: type, sampling: Sampling) -> None:
        self._class, self._sampling = made, sampling_values(sampling)
        self._agent: Any = None
        self.reductions: dict[str, str] = {IGNORED: "sum"}  # the class's own take the last step

    async def reset(self, seed: int, prompt: Prompt) -> Content:
        self._agent = await construct(self._class)
        self._label = prompt.label
        states = {"observation": prompt.text, "prompt": prompt.text, "label": prompt.label}
        if prompt.images:
            states["images"] = pictures(prompt)
        seeded = {"seed": seed} if takes(self._agent.reset, "seed") else {}
        found = await result(self._agent.reset(states, **seeded))
        self._text = _text(_value(found, "observation", "reset"))
        return _content(self._text, [placed.image.data for placed in prompt.images])

    async def step(self, action: str) -> Step:
        states = {
            "observation_text": self._text,
            "action_text": action,
            "label": self._label,
            "sampling_params": SimpleNamespace(**self._sampling),
        }
        found = await result(self._agent.step(states))
        step, asked, images = _read(found)
        changed = asked is not None and any(
            getattr(asked, name, value) != value for name, value in self._sampling.items()
        )
        assert isinstance(step.observation, str)
        self._text += action + step.observation
        self.reductions.update(dict.fromkeys(step.metrics, "last"))
        metrics = {**step.metrics, IGNORED: float(changed)}
        shown = _content(step.observation, images)
        return Step(**{**vars(step), "metrics": metrics, "observation": shown})

    async def close(self) -> None:
        if self._agent is not None and (close := getattr(self._agent, "close", None)):
            await result(close())


def _read(found: Any) -> tuple[Step, Any, Any]:
    """Return the result of an action, the sampling values that it asks for, and the images that it
    shows."""
    if isinstance(found, Mapping):
        step = Step(
            _text(_value(found, "environment_feedback", "step")),
            reward=scalar(_value(found, "rewards", "step"), "the reward"),
            done=bool(_value(found, "done", "step")),
            passed=verdict(found.get("scores")),
            metrics=numbers(found.get("extra_logs")),
        )
        return step, found.get("sampling_params"), found.get("images")
    reward = scalar(found.reward, "the reward")
    step = Step(
        _text(found.observation),
        reward=reward,
        done=bool(found.terminated),
        truncated=bool(found.truncated),
        passed=verdict(reward if found.score is None else found.score),
        metrics=numbers(found.info),
    )
    return step, found.sampling_params, found.images


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
