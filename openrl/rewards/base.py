"""The interface of rewards, which score the answers to one prompt."""

from __future__ import annotations

from typing import Protocol

from openrl.types import Group, Score


class Reward(Protocol):
    async def score(self, group: Group) -> list[Score]:
        """Return one score per trajectory, in their order. Several groups may be scored at a time.

        Raises UserError, naming the row, if the reward's code fails or returns something else.
        """

    async def close(self) -> None:
        """Release processes and connections. Calls that still run fail."""
