"""What every rollout engine keeps of its sleep: which parts are gone, and that nothing is asked of
them meanwhile."""

from __future__ import annotations

from typing import Literal

EnginePart = Literal["weights", "cache"]
"""What of an engine sleeps and wakes by itself."""


class Asleep:
    """The parts of an engine that are asleep."""

    def __init__(self) -> None:
        self.parts: set[EnginePart] = set()
        self.dropped = False
        """The weights went to sleep without a copy, and none were sent since."""

    def require(self, what: str, *parts: EnginePart) -> None:
        """Raises RuntimeError if ``what`` needs one of ``parts`` and it is asleep."""
        if asleep := [part for part in parts if part in self.parts]:
            raise RuntimeError(
                f"{what} needs {' and '.join(asleep)} of this engine, asleep now: wake it first"
            )

    def require_all(self, what: str) -> None:
        """Raises RuntimeError unless the whole engine is awake and has weights."""
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
