"""An asyncio loop whose clock jumps from event to event: hours of waiting take no time and have one
order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Deadlock(RuntimeError):
    """Every task waits, and nothing will happen."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """``time()`` starts at 0 and moves on only when every task waits, to the next thing due."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.SelectSelector):
    """Does not sleep for as long as the loop would; says so to the loop's clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("no task can go on, and nothing is due")
        self._loop.now += max(timeout, 0.0)
        return super().select(0)


def run_virtually(work: Coroutine[Any, Any, Result]) -> Result:
    """``asyncio.run`` on a virtual clock. Raises Deadlock where a real run would hang."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
