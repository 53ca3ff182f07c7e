"""Makes environments from classes with gym's ``reset`` and ``step``: Gymnasium's 5-tuples, the old
4-tuples, GEM's games, and those of ``openrl.games``. Their methods may be async.

An observation is text, a picture (a PIL image, or a uint8 array of height x width x 3), or a list
of texts and pictures. ``info`` may hold "action_is_valid", "success", "state", "metrics" {name:
number} and, from ``reset``, "env_instruction", which becomes a system message. A class attribute
``reductions`` {metric: mean | sum | min | max | first | last} says how a metric of the steps
becomes one of the episode.

Methods that are not async block the event loop, so slow ones belong in a separate process."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from openrl.agents.base import REDUCTIONS, Environment, Step
from openrl.agents.files import user_code
from openrl.errors import UserError
from openrl.extension_points import environments
from openrl.flags.settings import read_settings
from openrl.types import Image, Message, Prompt
from openrl.vision.parts import Content, as_content
from openrl.vision.pictures import is_picture, png_image
from openrl.waiting import maybe_await

log = logging.getLogger(__name__)
_undrawn: set[str] = set()  # environments whose ``render`` failed, which is said once


def make_environment(name: str, settings: Mapping[str, Any]) -> Environment:
    """Make the registered environment ``name``. Raises UserError for unknown names, unknown
    settings and classes that are not environments."""
    entry = environments[name]
    options = read_settings(f"environment {name}", entry.options, settings)
    return GymEnvironment(entry.component(options) if entry.options else entry.component())


def _check_methods(game: Any, name: str) -> None:
    """Raise UserError if an object lacks gym's methods."""
    for call, arguments, named in (("reset(seed)", [], {"seed": 0}), ("step(action)", [""], {})):
        try:
            method = getattr(game, call.partition("(")[0])
            inspect.signature(method).bind(*arguments, **named)
        except (AttributeError, TypeError):
            raise UserError(
                f"environment {name} has no method {call}",
                "reset(seed) -> (observation, info) and step(action) -> (observation, reward,"
                " terminated, truncated, info)",
            ) from None


class GymEnvironment(Environment):
    """Wraps an object with gym's methods."""

    def __init__(self, game: Any) -> None:
        name = type(game).__name__
        _check_methods(game, name)
        self.reductions = getattr(game, "reductions", {})
        wrong = {how for how in self.reductions.values() if how not in REDUCTIONS}
        if wrong:
            raise UserError(
                f"environment {name} has unknown reductions: {', '.join(sorted(wrong))}",
                f"one of {', '.join(REDUCTIONS)}",
            )
        self._game = game

    async def reset(self, seed: int, prompt: Prompt) -> Sequence[Message]:
        found = await maybe_await(self._game.reset(seed=seed))
        observation, info = found if isinstance(found, tuple) else (found, {})
        rules = info.get("env_instruction")
        system = [{"role": "system", "content": rules}] if rules else []
        return [*system, {"role": "user", "content": _content(observation)}]

    async def step(self, action: str) -> Step:
        found = await maybe_await(self._game.step(action))
        if not isinstance(found, tuple) or len(found) not in (4, 5):
            returned = len(found) if isinstance(found, tuple) else type(found).__name__
            raise TypeError(f"step must return gym's 5 or 4 values, not {returned}")
        observation, reward, done, *rest = found
        info, success = rest[-1], rest[-1].get("success")
        return Step(
            _content(observation),
            reward=user_code.scalar(reward, "the reward"),
            done=bool(done),
            truncated=bool(rest[0]) if len(rest) == 2 else False,
            valid=bool(info.get("action_is_valid", True)),
            metrics={n: user_code.scalar(value, n) for n, value in info.get("metrics", {}).items()},
            state=info.get("state"),
            passed=None if success is None else user_code.scalar(success, "success"),
            feedback=str(info.get("feedback", "")),
        )

    async def frame(self) -> Image | None:
        """Return None too if ``render`` fails, since only people would see the picture."""
        render = getattr(self._game, "render", None)
        # in gym's mode "human" it opens a window, and in others it draws text or fails
        if render is None or getattr(self._game, "render_mode", "rgb_array") != "rgb_array":
            return None
        try:
            frame = await maybe_await(render())
            return png_image(frame) if is_picture(frame) else None
        except Exception as error:
            name = type(self._game).__name__
            if name not in _undrawn:
                _undrawn.add(name)
                log.warning(
                    "render() of %s failed, so transcripts show no picture: %r", name, error
                )
            return None

    async def close(self) -> None:
        if close := getattr(self._game, "close", None):
            await maybe_await(close())


def _content(observation: Any) -> Content:
    content = as_content(observation)
    if content is None:
        kind = type(observation).__name__
        raise TypeError(f"an observation must be text, a picture or a list of both, not {kind}")
    return content
