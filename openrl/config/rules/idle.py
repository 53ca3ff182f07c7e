"""Flags that do nothing in the company of others. Asking for one is a problem: it would not do what
was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from openrl.config.commands import PPOConfig
from openrl.flags.checks import Problem, check


@dataclass(frozen=True)
class Idle:
    """``flags`` act only where ``acts(config)``; ``otherwise`` says why not, ``fix`` how they
    would."""

    flags: tuple[str, ...]
    acts: Callable[[Any], bool]
    otherwise: str
    fix: str
    commands: tuple[type, ...] = (PPOConfig,)

    def __call__(self, config: Any, given: frozenset[str]) -> Iterator[Problem]:
        asked = tuple(name for name in self.flags if name in given)
        if asked and not self.acts(config):
            yield Problem(asked, f"no effect: {self.otherwise}", f"leave it out, or {self.fix}")


IDLE: list[Idle] = []


def add(*rows: Idle) -> None:
    """Make rules of the rows."""
    for row in rows:
        check(*row.commands)(row)
    IDLE.extend(rows)
