"""The messages between an agent and the process that runs a user's file. This module uses the
standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
    """An executor's question. The answer is the ``Completion`` of these tokens, and its text with
    special tokens."""

    token_ids: list[int]
    max_tokens: int | None
    stop: tuple[str, ...]
    images: list[Any] | None = None  # its own images, or indices of the row's; None: the row's
