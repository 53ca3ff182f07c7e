"""Environments of files that write the chat themselves, as plain text.

Their ``reset`` and ``step`` take a dict. What the policy writes and what they return is
concatenated as it is. Runs in the process of the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from openrl.agents.base import Environment, Step
from openrl.agents.files import user_code
from openrl.agents.files.environments import EnvironmentAdapter
from openrl.compat.shared.arguments import pictures, sampling_values
from openrl.processes.interfaces import takes
from openrl.types import Prompt, Sampling
from openrl.waiting import maybe_await

if TYPE_CHECKING:
    from openrl.vision.parts import Content

IGNORED = "sampling_params_ignored"  # metric: turns that asked for other sampling values

ReadStep = Callable[[Any], tuple[Step, Any]]
"""Takes what ``step`` returned. Returns it as a ``Step``, whose observation is made by ``content``,
and the sampling parameters that it asks for; None if it asks for none."""


def adapt_raw_text(made: type, read: ReadStep) -> EnvironmentAdapter:
    return EnvironmentAdapter(lambda prompt, sampling: RawTextEnvironment(made, sampling, read))


class RawTextEnvironment(Environment):
    def __init__(self, made: type, sampling: Sampling, read: ReadStep) -> None:
        self._class, self._read = made, read
        self._sampling = sampling_values(sampling)
        self._environment: Any = None
        self.reductions: dict[str, str] = {IGNORED: "sum"}  # the class's own take the last step

    async def reset(self, seed: int, prompt: Prompt) -> Content:
        self._environment = await user_code.construct(self._class)
        self._label = prompt.label
        states = {"observation": prompt.text, "prompt": prompt.text, "label": prompt.label}
        if prompt.images:
            states["images"] = pictures(prompt)
        seeded = {"seed": seed} if takes(self._environment.reset, "seed") else {}
        found = await maybe_await(self._environment.reset(states, **seeded))
        self._text = text_of(value_of(found, "observation", "reset"))
        return content(self._text, [placed.image.data for placed in prompt.images])

    async def step(self, action: str) -> Step:
        states = {
            "observation_text": self._text,
            "action_text": action,
            "label": self._label,
            "sampling_params": SimpleNamespace(**self._sampling),
        }
        found = await maybe_await(self._environment.step(states))
        step, wanted = self._read(found)
        changed = wanted is not None and any(
            getattr(wanted, name, value) != value for name, value in self._sampling.items()
        )
        shown: Any = step.observation
        self._text += action + (shown if isinstance(shown, str) else shown[0]["text"])
        self.reductions.update(dict.fromkeys(step.metrics, "last"))
        return replace(step, metrics={**step.metrics, IGNORED: float(changed)})

    async def close(self) -> None:
        if self._environment is not None and (close := getattr(self._environment, "close", None)):
            await maybe_await(close())


def content(text: str, images: Any) -> Content:
    """Return an observation. The text has the marks of its images, whose parts follow it."""
    shown = [{"type": "image", "image": image} for image in images or ()]
    return [{"type": "text", "text": text}, *shown] if shown else text


def value_of(found: Any, key: str, method: str) -> Any:
    """Return a value of the dict that a method returned. Raises TypeError if it is not there."""
    if not isinstance(found, Mapping) or key not in found:
        raise TypeError(f"{method} must return a dict with {key!r}")
    return found[key]


def text_of(value: Any) -> str:
    """Return an observation that must be text. Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"an observation must be text, not {type(value).__name__}")
    return value
