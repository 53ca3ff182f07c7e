"""What rows cost to run, where packed rows of a group may share their common prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self, TypeVar

import torch
from torch import Tensor

from openrl.algorithms.partition import RowCost
from openrl.experience import TokenBatch

DUMMY = -1
"""A row of one token that trains nothing, for ranks that run out of rows."""

Number = TypeVar("Number", int, Tensor)


def common_prefixes(token_ids: Tensor, attention_mask: Tensor, groups: Tensor) -> Tensor:
    """Return how many leading tokens, but never all, the rows of each row's group share, (B,).

    Args:
        token_ids, attention_mask: (B, T) int64 and bool, padded on the right.
        groups: (B,) numbers, equal for rows to compare.
    """
    _, group = groups.unique(return_inverse=True)
    count = int(group.max()) + 1
    numbers = torch.arange(len(group), device=group.device)
    head = numbers.new_full((count,), len(group)).scatter_reduce(0, group, numbers, "amin")[group]
    alike = (token_ids == token_ids[head]) & attention_mask & attention_mask[head]
    own = torch.minimum(alike.long().cumprod(1).sum(1), attention_mask.sum(1) - 1)
    return own.new_full((count,), token_ids.shape[1]).scatter_reduce(0, group, own, "amin")[group]


def saved_tokens(rows: Number, prefix: Number) -> Number:
    """Return how many tokens are saved if one of ``rows`` rows computes their common ``prefix`` for
    all. Each row computes the prefix's last token again, so the result can be 0 or less."""
    return (rows - 1) * prefix - rows


@dataclass(frozen=True)
class RowSizes:
    """Lengths and costs of a batch's rows, by row number."""

    lengths: Sequence[int]
    cost: RowCost = RowCost()
    groups: Sequence[int] | None = None  # None: every row computes all its tokens
    prefixes: Sequence[int] = ()  # ``common_prefixes``

    @classmethod
    def of(cls, batch: TokenBatch, cost: RowCost) -> Self:
        lengths = batch.lengths.tolist()
        if not cost.shared:
            return cls(lengths, cost)
        prefixes = common_prefixes(batch.token_ids, batch.attention_mask, batch.group_ids)
        return cls(lengths, cost, batch.group_ids.tolist(), prefixes.tolist())

    def tokens(self, rows: Sequence[int]) -> int:
        """Return the most tokens that a packed micro-batch of these rows computes."""
        return sum(max(self._length(row), 1) for row in rows) - sum(
            saved for saved, _ in self._shared(rows)
        )

    def costs(self, rows: Sequence[int]) -> float:
        """Return what the rows cost together, in tokens of a short row; dummies cost nothing."""
        whole = sum(self.cost(self._length(row)) for row in rows)
        return whole - sum(
            saved + self.cost.attention * pairs for saved, pairs in self._shared(rows)
        )

    def _length(self, row: int) -> int:
        return 0 if row == DUMMY else self.lengths[row]

    def _shared(self, rows: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the (tokens, pairs of tokens in attention) that each run of siblings saves."""
        if self.groups is None:
            return
        for _, run in groupby((row for row in rows if row != DUMMY), key=self.groups.__getitem__):
            first, *others = run
            if (saved := saved_tokens(len(others) + 1, self.prefixes[first])) > 0:
                yield saved, len(others) * self.prefixes[first] ** 2
