"""Finds the class of a user's file that is to be played. Runs in the file's process."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from openrl.agents.interfaces import AgentInterface, known_interfaces
from openrl.processes.interfaces import detect_interface
from openrl.processes.worker import NotUsable


def find_class(module: ModuleType, name: str | None) -> tuple[Any, AgentInterface]:
    """Return the class of that name or, without a name, the file's main class or else its only
    class with a known interface, and the interface. Raises NotUsable."""
    own = {
        n: made
        for n, made in vars(module).items()
        if isinstance(made, type) and (made.__module__ == module.__name__ or n == name)
    }
    if name is not None and name not in own:
        raise NotUsable(f"it has no class {name}, but {_list_classes(own)}")
    wanted = [name] if name else own
    playable = {n: found for n in wanted if (found := _playable(own[n]))}
    if not playable:
        known = "".join(f"\n  {interface.shape}" for interface in known_interfaces())
        raise NotUsable(
            f"none of its classes can be played: {_list_classes(own)}. These can be:{known}"
        )
    # in early versions a main class may run nothing; then the next one counts
    mains = [n for interface in known_interfaces() for n in interface.main_classes]
    main, *others = [n for n in mains if n in playable][:1] or playable
    if others:
        names = ", ".join(made.__name__ for made, _ in playable.values())
        raise NotUsable(f"several of its classes can be played: {names}; name one, PATH.py:CLASS")
    made, interface = playable[main]
    if problem := interface.problem(made):
        raise NotUsable(problem)
    return made, interface


def _playable(made: Any) -> tuple[Any, AgentInterface] | None:
    """Return the class, or the class that it names to be played, with its interface."""
    if interface := detect_interface(made, known_interfaces()):
        return made, interface
    named = (known.named_by(made) for known in known_interfaces() if known.named_by)
    found = next(filter(None, named), None)
    return _playable(found) if found else None


def _list_classes(own: Mapping[str, type]) -> str:
    def methods(made: type) -> str:
        return ", ".join(n for n, f in vars(made).items() if inspect.isfunction(f) and n[0] != "_")

    return (
        "; ".join(f"{n} with {methods(made) or 'no method'}" for n, made in own.items()) or "none"
    )
