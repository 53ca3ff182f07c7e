"""Plays a user's file in its process. This module uses the standard library only."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openrl.agents.files.calls import AgentInfo, MethodCall
from openrl.agents.files.detect import find_class
from openrl.agents.files.stand_ins import install_stand_ins
from openrl.processes.worker import AskParent, Loaded, load_module
from openrl.registry import load_plugins, resolve


@dataclass(frozen=True)
class AgentFile:
    """A Python file and the name of the class in it; None means one with a known interface."""

    path: Path  # absolute
    class_name: str | None = None
    plugins: tuple[str, ...] = ()  # modules that may register interfaces
    settings: Mapping[str, Any] = field(default_factory=dict)  # of --env_config
    max_turns: int | None = None  # of an episode

    def __str__(self) -> str:
        return f"--agent_func_path {self.path}" + (f":{self.class_name}" if self.class_name else "")

    def load(self) -> Loaded:
        """Load the file. What it says about itself is an ``AgentInfo``."""
        load_plugins(self.plugins)
        install_stand_ins()
        made, interface = find_class(load_module(self.path, "agent_file"), self.class_name)
        adapter: Adapter = resolve(interface.adapter)(made)
        adapter.file = self
        info = AgentInfo(interface, made.__name__, adapter.schemas, adapter.rewards)
        return Loaded(adapter.call, info)


class Adapter:
    """Plays the episodes of a class. ``MethodCall`` names a method of a subclass; this class alone
    stands for an agent that plays in the engine's process."""

    schemas: Sequence[Mapping[str, Any]] = ()  # of its tools
    rewards: bool | None = None  # whether it gives rewards; None: this shows only when it plays
    file: AgentFile
    ask: AskParent

    def __init__(self, made: Any) -> None:
        self._class = made
        self._runner = asyncio.Runner()  # one event loop, which the file's objects may be tied to

    def call(self, request: MethodCall, ask: AskParent) -> Any:
        self.ask = ask
        return self.result(getattr(self, request.method)(*request.arguments))

    def result(self, value: Any) -> Any:
        """Return the result of a coroutine, and any other value as it is. What the file's code does
        before it returns one may set signals and run event loops of its own."""
        return self._runner.run(value) if inspect.iscoroutine(value) else value
