"""The messages between an agent and the process that runs a user's file. This module uses the
standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrl.agents.interfaces import AgentInterface


@dataclass(frozen=True)
class MethodCall:
    """A call of the adapter's method with this name."""

    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class AgentInfo:
    """What a file brings."""

    interface: AgentInterface
    class_name: str
    schemas: Sequence[Mapping[str, Any]] = ()  # of its tools
    rewards: bool | None = None  # whether it gives rewards; None: this shows only when it plays
