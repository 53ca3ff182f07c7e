"""How the process of a user's file calls it, and reads what it returns.

This module and what it imports use the standard library only, so that the process does not import
torch unless the file does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from openrl.agents.base import EpisodeResult
from openrl.processes.interfaces import takes
from openrl.processes.worker import WrongValueError
from openrl.rewards.protocol import read_verdict
from openrl.types import Message, Prompt
from openrl.waiting import maybe_await


async def construct(made: Any, **offered: Any) -> Any:
    """Make an object. Its ``__init__``, perhaps a coroutine, gets what it takes of ``offered``."""
    agent = made.__new__(made)
    if made.__init__ is not object.__init__:
        given = {name: value for name, value in offered.items() if takes(agent.__init__, name)}
        await maybe_await(agent.__init__(**given))
    return agent


def chat_for_clients(prompt: Prompt) -> list[Message]:
    """Return the prompt as a chat that OpenAI's clients can send unchanged."""
    if not prompt.images:
        return prompt.chat
    from openrl.vision.parts import messages_for_clients  # rows of text do not need PIL

    return messages_for_clients(prompt)


# -- reading what it returns -----------------------------------------------------------------------


def read_scores(found: Mapping[str, Any]) -> EpisodeResult:
    """Read {"reward", "scores"?, "extra_logs"?}."""
    reward = None if found.get("reward") is None else scalar(found["reward"], "the reward")
    logs = found.get("extra_logs")
    passed = verdict(found.get("scores"), reward)
    return EpisodeResult(reward, passed, numbers(logs), feedback=feedback(logs))


def scalar(value: Any, name: str) -> float:
    """Return a finite number, or a tensor or list that holds one, as a float. Raises TypeError, and
    WrongValueError for a number that is not finite: a reward of NaN would stand for a trajectory to
    drop."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}") from None
    except OverflowError:  # integers can have any length
        raise WrongValueError(f"{name} is an integer that no float can hold") from None
    if not math.isfinite(number):
        raise WrongValueError(f"{name} is {number}, not a finite number")
    return number


def verdict(value: Any, reward: float | None) -> float | None:
    """Return ``scores`` as a verdict; None if there is none. Raises like ``scalar`` and
    ``read_verdict``."""
    return None if value is None else read_verdict(scalar(value, "the score"), reward)


def feedback(logs: Mapping[str, Any] | None) -> str:
    """Return the text under ``feedback``, as rewards give it; empty if there is none."""
    told = (logs or {}).get("feedback")
    return told if isinstance(told, str) else ""


def numbers(values: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the values that are finite numbers."""
    found = {}
    for name, value in (values or {}).items():
        try:
            found[name] = scalar(value, name)
        except (TypeError, ValueError):
            continue
    return found
