"""The order in which rows are read, by their number, the seed and the pass; resumed exactly."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from openrl.errors import UserError
from openrl.files import as_utf8
from openrl.types import PlacedImage, Prompt, PromptGroup

T = TypeVar("T")


def fingerprint(rows: Iterable[tuple[list[int], str, Sequence[PlacedImage]]]) -> str:
    """Return a short hash of token rows, their images, and what else identifies them."""
    digest = hashlib.blake2b(digest_size=8)
    for token_ids, text, images in rows:
        rest = " ".join([text, *(placed.image.sha256 for placed in images)])
        digest.update(array("q", [len(token_ids), *token_ids]).tobytes() + as_utf8(rest) + b"\n")
    return digest.hexdigest()


class PromptOrder(Protocol):
    """What says which prompt is next."""

    items: Sequence[Prompt]
    size: int

    def take(self, count: int) -> list[Prompt]:
        """Return the next prompts."""

    def peek(self, count: int) -> list[Prompt]:
        """Return prompts that may come next, without taking them."""

    def learn(self, groups: Iterable[PromptGroup]) -> None:
        """Take note of the groups that a training step has got."""

    def counts(self) -> dict[str, float]:
        """Return the metrics of a step by name, and begin to count anew."""

    def state(self) -> dict[str, Any]:
        """Return what ``load_state`` continues from."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken. Raises UserError if that is not possible."""


def check_kind(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise UserError if ``state`` was taken from another kind of order than ``own``."""
    if state.keys() != own.keys():
        raise UserError(
            "cannot resume the data order: the checkpoint's run chose its prompts in another way",
            "resume with the same --curriculum flags, or start fresh with --overwrite_ckpt",
        )


class SeededStream(Generic[T]):
    """The items again and again, without end. With ``shuffle``, each pass has an order of its own
    that depends only on (seed, pass). ``state`` and ``load_state`` are exact even within a pass.

    ``data`` is a fingerprint of the items; a state taken from others is refused.
    """

    def __init__(
        self, items: Sequence[T], seed: int, *, shuffle: bool = True, data: str = ""
    ) -> None:
        if not items:
            raise ValueError("a stream needs at least one item")
        self.items, self.size = items, len(items)
        self.seed, self.shuffle, self.data = seed, shuffle, data
        self._go_to(0, 0)

    def take(self, count: int) -> list[T]:
        """Return the next items. Across the end of a pass the same item may come twice."""
        taken: list[T] = []
        while len(taken) < count:
            chunk = self._pass[self.position : self.position + count - len(taken)]
            taken += [self.items[i] for i in chunk]
            self.position += len(chunk)
            if self.position == self.size:
                self._go_to(self.epoch + 1, 0)
        return taken

    def peek(self, count: int) -> list[T]:
        """Return what ``take`` would, without taking it."""
        epoch, position = self.epoch, self.position
        try:
            return self.take(count)
        finally:
            self._go_to(epoch, position)

    def learn(self, groups: Iterable[PromptGroup]) -> None:
        """Do nothing: the order does not depend on answers."""

    def counts(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {**self._identity(), "epoch": self.epoch, "position": self.position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken. Raises UserError if rows, seed or shuffling differ,
        because the order would be a different one."""
        check_kind(state, self.state())
        differ = [key for key, now in self._identity().items() if state[key] != now]
        if differ:
            facts = [
                f"{key} {state[key]}, this run {getattr(self, key)}"
                for key in differ
                if key != "data"
            ]
            raise UserError(
                "cannot resume the data order: the checkpoint has"
                f" {'; '.join(facts) or 'as many rows, but others'}",
                "resume with the same data, filters, --shuffle and --data_seed, or start fresh with"
                " --overwrite_ckpt",
            )
        self._go_to(state["epoch"], state["position"])

    def _identity(self) -> dict[str, Any]:
        return {"size": self.size, "seed": self.seed, "shuffle": self.shuffle, "data": self.data}

    def _go_to(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        self._pass = list(range(self.size))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(self._pass)
