"""What can be registered to play episodes: interfaces of classes in files, servers of environments,
and files of tools. Standard library only, because every process reads these records; what does the
work is named as "module:name" and imported on first use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from openrl.extension_points import agent_interfaces
from openrl.processes.interfaces import Signature, parameters, required


@dataclass(frozen=True)
class AgentInterface:
    """A way to write an agent or environment as a class of a file."""

    shape: str  # shown to people
    adapter: str  # takes the class, returns the ``Adapter`` that plays it in the file's process
    agent: str = ""  # an ``AgentOfFile``; empty: the class plays in the engine's process
    methods: Mapping[str, tuple[Signature, ...]] = field(default_factory=dict)
    """Name -> the ways to call it, one of which fits."""
    known_by: Callable[[Any], bool] | None = None  # what tells a class with these methods apart
    rank: int = 1  # a class is compared with interfaces of lower rank first
    offered: tuple[str, ...] = ()  # arguments that constructors may ask for
    main_classes: tuple[str, ...] = ()  # names of the class to play where a file has several
    named_by: Callable[[Any], Any] | None = None
    """Returns the class to play that another class of the file names; None if it names none."""
    needs_endpoint: bool = False  # it asks a chat endpoint
    plays_alone: bool = False  # only it knows when a turn begins
    builds_rows: bool = False  # it says which tokens are trained

    def fits(self, made: Any) -> bool:
        has_methods = all(callable(getattr(made, name, None)) for name in self.methods)
        return has_methods and (self.known_by is None or self.known_by(made))

    def problem(self, made: Any) -> str | None:
        """Say why a class cannot be made or its methods cannot be called; None if all is well."""
        for name, signatures in self.methods.items():
            function = getattr(made, name)
            if not any(signature.accepts(function) for signature in signatures):
                shown = str(inspect.signature(function)).partition(" ->")[0]
                return f"{made.__name__}.{name}{shown} cannot be called as {self.shape}"
        itself = next(iter(parameters(made.__init__)), "")
        missing = required(made.__init__, (itself, *self.offered))
        if missing and self.agent:  # an agent of the engine's process gets what it needs
            return f"{made.__name__}.__init__ needs {', '.join(missing)}, which nothing provides"
        return None


def known_interfaces() -> list[AgentInterface]:
    """Return all interfaces, in the order in which a class is compared with them."""
    known: list[AgentInterface] = [entry.component for entry in agent_interfaces.entries()]
    return sorted(known, key=lambda interface: interface.rank)


@dataclass(frozen=True)
class AgentServer:
    """Servers of environments, which --agent_func_path names as NAME:ADDRESS."""

    schemes: tuple[str, ...]  # how their addresses begin
    example: str  # shown to people
    open: str
    """An async context manager that takes (address, EpisodeConfig, Endpoint or None) and opens the
    agent of one engine."""
    check: str  # takes an address, raises UserError if no such server is there; may be a coroutine
    plays_alone: bool = False  # it plays against the endpoint; otherwise the agent takes the turns


@dataclass(frozen=True)
class ToolFiles:
    """Tools in files that are not plain functions."""

    endings: tuple[str, ...]  # of the names of its files; besides, its classes may be in FILE.py
    example: str  # shown to people
    read_file: str  # takes the path of such a file, returns an ``OpenToolset``; raises UserError
    read_module: str
    """Takes a module and the name of the class wanted, None for all; returns an ``OpenToolset``, or
    None without tools; raises UserError."""
