"""What is known of the flags of another system. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MissingFlag:
    """Why commands lack a flag that others have, and what to give instead."""

    why: str
    fix: str = ""  # empty: the flag is ignored with a warning
    commands: tuple[str, ...] = ()  # names of the commands that lack it; empty: all


@dataclass(frozen=True)
class FlagNames:
    """The flags of a system, by their names there."""

    meaning: Mapping[str, str] = field(default_factory=dict)  # name there -> the flag here
    missing: Mapping[str, MissingFlag] = field(default_factory=dict)
