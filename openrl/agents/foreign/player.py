"""Plays a user's file in its process. This module uses the standard library only."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrl.agents.foreign.calls import Call, Facts
from openrl.agents.foreign.recognise import find_class
from openrl.agents.foreign.shims import install_shims
from openrl.processes.worker import AskParent, Loaded, load_module


@dataclass(frozen=True)
class AgentFile:
    """A Python file and the name of the class in it; None means one of a known kind."""

    path: Path  # absolute
    class_name: str | None = None

    def __str__(self) -> str:
        return f"--agent_func_path {self.path}" + (f":{self.class_name}" if self.class_name else "")

    def load(self) -> Loaded:
        """Load the file. What it says about itself is a ``Facts``."""
        install_shims()
        made, kind = find_class(load_module(self.path, "agent_file"), self.class_name)
        module, _, name = kind.player.partition(".")
        # imported only now, because a kind may need large libraries
        home = importlib.import_module(f"openrl.agents.foreign.{module}")
        player: Player = getattr(home, name)(made)
        facts = Facts(kind.name, made.__name__, player.schemas, player.rewards)
        return Loaded(player.call, facts)


class Player:
    """Plays the episodes of a class. ``Call`` names a method of a subclass; this class alone stands
    for an agent that plays in the engine's process."""

    schemas: Sequence[Mapping[str, Any]] = ()  # of its tools
    rewards: bool | None = None  # whether it gives rewards; None: this shows only when it plays
    ask: AskParent

    def __init__(self, made: Any) -> None:
        self._class = made
        self._runner = asyncio.Runner()  # one event loop, which the file's objects may be tied to

    def call(self, asked: Call, ask: AskParent) -> Any:
        self.ask = ask
        return self._runner.run(getattr(self, asked.method)(*asked.arguments))
