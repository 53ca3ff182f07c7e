"""What user code is written for, and which arguments it takes. Standard library only, because this
runs in the processes of user code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar


class Interface(Protocol):
    """A way to write a class or a function that openrl can call."""

    def fits(self, made: Any) -> bool:
        """Whether the class or function is written in this way, be it with mistakes."""


I = TypeVar("I", bound=Interface)  # noqa: E741


def detect_interface(made: Any, interfaces: Iterable[I]) -> I | None:
    """Return the first of the interfaces that the class or function ``made`` is written for."""
    return next((interface for interface in interfaces if interface.fits(made)), None)


@dataclass(frozen=True)
class Signature:
    """One way to call a function."""

    positional: int = 0  # with the object itself, for the method of a class
    keywords: tuple[str, ...] = ()

    def accepts(self, function: Callable[..., Any]) -> bool:
        """Whether a function can be called in this way."""
        try:
            given = [None] * self.positional
            inspect.signature(function).bind(*given, **dict.fromkeys(self.keywords))
        except TypeError:
            return False
        return True


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function by name, without *args, **kwargs and the ``self`` of a
    bound method."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {n: p for n, p in inspect.signature(function).parameters.items() if p.kind not in kinds}


def required(function: Any, offered: Iterable[str]) -> list[str]:
    """Return the parameters without a default that are not among those ``offered``."""
    return [
        name
        for name, parameter in parameters(function).items()
        if parameter.default is parameter.empty and name not in {*offered}
    ]


def takes_any_keyword(function: Any) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def takes(function: Any, name: str) -> bool:
    """Whether a function takes a keyword argument of that name."""
    return name in parameters(function) or takes_any_keyword(function)
