"""The order in which rows are read: shuffled anew each pass, exact to resume. Standard library only."""

from __future__ import annotations

import random

from openrl.errors import UserError


class SeededOrder:
    """Endless row numbers below ``size``: every pass is a shuffle that follows from (seed, pass) alone."""

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise ValueError("an order needs at least one row")
        self.size, self.seed = size, seed
        self._go_to(0, 0)

    def take(self, count: int) -> list[int]:
        """The next ``count`` row numbers, over the ends of passes if need be."""
        taken: list[int] = []
        while len(taken) < count:
            chunk = self._pass[self.position : self.position + count - len(taken)]
            taken += chunk
            self.position += len(chunk)
            if self.position == self.size:
                self._go_to(self.epoch + 1, 0)
        return taken

    def state(self) -> dict[str, int]:
        return {"seed": self.seed, "size": self.size, "epoch": self.epoch, "position": self.position}

    def load_state(self, state: dict[str, int]) -> None:
        """Go on where ``state`` was taken. Raises UserError if rows or seed differ: the order would be another."""
        for key, now in (("size", self.size), ("seed", self.seed)):
            if state[key] != now:
                raise UserError(
                    f"cannot resume the data order: the checkpoint has {key} {state[key]}, this run {now}",
                    "resume with the same data, filters and --seed, or start fresh with --overwrite_ckpt",
                )
        self._go_to(state["epoch"], state["position"])

    def _go_to(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        self._pass = list(range(self.size))
        random.Random(f"{self.seed}/{epoch}").shuffle(self._pass)
