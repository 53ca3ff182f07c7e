"""What tells the classes of several systems apart. Standard library only."""

from __future__ import annotations

from typing import Any


def has_base(made: type, system: str, name: str) -> bool:
    """Whether a class is derived from ``name`` of a system, or of what stands in for it."""
    return any(
        base.__name__ == name and system in base.__module__.split(".") for base in made.__mro__[1:]
    )


def class_of_runner(made: type, runner: str, attribute: str) -> Any | None:
    """Return the class that a runner keeps in ``attribute``. ``made`` is a runner if the name of a
    base class ends in ``runner``; None for any other class."""
    if not any(base.__name__.endswith(runner) for base in made.__mro__[1:]):
        return None
    try:
        return vars(made()).get(attribute)
    except TypeError:  # in early versions runners have parameters
        return None
