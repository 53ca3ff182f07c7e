"""The messages between an agent and the process that runs a user's file.

This module and what it imports use the standard library only, so that the process does not import
torch unless the file does."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrl.types import Message, Prompt, Sampling


@dataclass(frozen=True)
class Call:
    """A call of the player's method with this name."""

    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What a file brings."""

    kind: str  # name of a ``recognise.Kind``
    class_name: str
    schemas: Sequence[Mapping[str, Any]] = ()  # of its tools
    rewards: bool | None = None  # whether it gives rewards; None: this shows only when it plays


@dataclass(frozen=True)
class TokenizerRequest:
    """An executor's question for the tokenizer, asked once per process."""


@dataclass(frozen=True)
class GenerateRequest:
    """An executor's question for a completion of these tokens."""

    token_ids: list[int]
    max_tokens: int | None
    stop: tuple[str, ...]
    images: list[Any] | None = None  # its own images, or indices of the row's; None: the row's


@dataclass(frozen=True)
class GenerateReply:
    """The answer to ``GenerateRequest``."""

    token_ids: list[int]
    logprobs: list[float]
    text: str  # special tokens included
    finish_reason: str  # stop or length


@dataclass(frozen=True)
class EpisodeResult:
    """What an executor or a program says about its episode."""

    reward: float | None
    passed: float | None = None
    metrics: Mapping[str, float] | None = None
    truncated: bool = False
    token_ids: list[int] | None = None  # from an executor: all tokens of the episode
    action_ranges: list[tuple[int, int]] | None = None  # [start, end) of the sampled tokens


def chat_for_clients(prompt: Prompt) -> list[Message]:
    """Return the prompt as a chat that OpenAI's clients can send unchanged."""
    if not prompt.images:
        return prompt.chat
    from openrl.vision.parts import messages_for_clients  # rows of text do not need PIL

    return messages_for_clients(prompt)


def sampling_values(sampling: Sampling) -> dict[str, Any]:
    """Return the values of vLLM's ``SamplingParams``."""
    return {**vars(sampling), "stop": list(sampling.stop), "logprobs": 1}


async def result(value: Any) -> Any:
    """Return the result of a function that may be a coroutine."""
    return await value if inspect.isawaitable(value) else value


def scalar(value: Any, name: str) -> float:
    """Return a number as a float. It may also be a tensor or a list that holds one number. Raises
    TypeError."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}") from None


def verdict(value: Any) -> float | None:
    """Return ``scores`` as a verdict; None if it is not in [0, 1]."""
    number = None if value is None else scalar(value, "the score")
    return number if number is not None and 0 <= number <= 1 else None


def numbers(values: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the values that are numbers."""
    found = {}
    for name, value in (values or {}).items():
        try:
            found[name] = scalar(value, name)
        except TypeError:
            continue
    return found
