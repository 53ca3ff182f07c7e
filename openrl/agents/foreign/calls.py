"""What is said between an agent and the process that runs somebody's file.

Standard library only: the process imports no torch that the file does not import."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A ``Prompt`` and the values of ``Sampling``, as plain data."""

    id: str
    text: str
    label: Any
    messages: Sequence[Mapping[str, Any]]
    source: str
    meta: Mapping[str, Any]
    sampling: Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """Call the player's method of that name."""

    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What a file brings."""

    kind: str  # of ``recognise``
    class_name: str
    schemas: Sequence[Mapping[str, Any]] = ()  # of tools
    rewards: bool | None = None  # whether it gives rewards; None: that shows when it plays


@dataclass(frozen=True)
class TokenizerAsked:
    """Question of an executor, once for each process."""


@dataclass(frozen=True)
class Generation:
    """Question of an executor: what follows these tokens."""

    token_ids: list[int]
    max_tokens: int | None
    stop: tuple[str, ...]


@dataclass(frozen=True)
class Generated:
    """The answer."""

    token_ids: list[int]
    logprobs: list[float]
    text: str  # special tokens included
    finish_reason: str  # stop or length


@dataclass(frozen=True)
class Played:
    """What an executor or a program says of its episode."""

    reward: float | None
    passed: float | None = None
    metrics: Mapping[str, float] | None = None
    truncated: bool = False
    token_ids: list[int] | None = None  # of an executor: all that the episode was made of
    action_ranges: list[tuple[int, int]] | None = None  # [start, end) of what was sampled


async def result(value: Any) -> Any:
    """Of a function that may be a coroutine."""
    return await value if inspect.isawaitable(value) else value


def scalar(value: Any, name: str) -> float:
    """A number, a tensor of one number, or a list of one."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is no number but {type(value).__name__}") from None


def verdict(value: Any) -> float | None:
    """``scores`` as in [0, 1]; None if it is something else."""
    number = None if value is None else scalar(value, "the score")
    return number if number is not None and 0 <= number <= 1 else None


def numbers(values: Mapping[str, Any] | None) -> dict[str, float]:
    """Those that are numbers."""
    found = {}
    for name, value in (values or {}).items():
        try:
            found[name] = scalar(value, name)
        except TypeError:
            continue
    return found
