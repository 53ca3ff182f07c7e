"""The record of a rollout engine's sleeping parts, which refuses whatever needs one of them."""

from __future__ import annotations

from typing import Literal

EnginePart = Literal["weights", "cache"]
"""The parts of an engine that sleep and wake independently."""


class SleepRecord:
    """The sleeping parts of one engine."""

    def __init__(self) -> None:
        self.parts: set[EnginePart] = set()
        self.dropped = False
        """The weights fell asleep without a copy, and no sync has brought new ones since."""

    def require(self, what: str, *parts: EnginePart) -> None:
        """Raise RuntimeError if one of ``parts``, which ``what`` needs, is asleep."""
        if asleep := [part for part in parts if part in self.parts]:
            raise RuntimeError(
                f"{what} needs {' and '.join(asleep)} of this engine, asleep now: wake it first"
            )

    def require_all(self, what: str) -> None:
        """Raise RuntimeError unless the whole engine is awake and has weights."""
        self.require(what, "weights", "cache")
        if self.dropped:
            raise RuntimeError(
                "this engine dropped its weights when it slept, and none were sent since"
            )

    def add(self, *parts: EnginePart) -> None:
        self.require("sleep", *parts)
        self.parts |= {*parts}

    def remove(self, *parts: EnginePart) -> None:
        if awake := [part for part in parts if part not in self.parts]:
            raise RuntimeError(f"{' and '.join(awake)} of this engine is awake already")
        self.parts -= {*parts}
