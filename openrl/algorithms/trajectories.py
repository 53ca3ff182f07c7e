"""The rows of a batch seen as trajectories: what was earned, and all sampled tokens in one row.
torch only.

N trajectories of B rows; S is the most tokens that were sampled in one trajectory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from openrl.algorithms.masked import grouped_moments, standardise
from openrl.types import ExperienceBatch


@dataclass(frozen=True)
class Trajectories:
    """Which rows and which sampled tokens belong to which trajectory."""

    index: Tensor  # (B,) int64, the row's trajectory
    first: Tensor  # (N,) int64, each trajectory's first row
    lengths: Tensor  # (N,) int64, sampled tokens in all rows
    loss_mask: Tensor  # (B, T) bool
    columns: Tensor  # (B, T) int64, where ``gather`` puts a sampled token, in [0, S)
    width: int  # S, at least 1

    @classmethod
    def of(cls, batch: ExperienceBatch) -> Self:
        mask = batch.loss_mask
        ids, index = batch.trajectory_ids.unique(return_inverse=True)
        sampled = mask.sum(-1)
        lengths = torch.zeros_like(ids).index_add(0, index, sampled)
        order = index.argsort(stable=True)  # rows, those of a trajectory one behind the other
        first = order[index.bincount().cumsum(0) - index.bincount()]
        # sampled tokens in earlier rows: of the row's own trajectory, and of all before that one
        earlier = torch.empty_like(sampled)
        earlier[order] = sampled[order].cumsum(0) - sampled[order]
        before = earlier - (lengths.cumsum(0) - lengths)[index]
        width = max([1, *lengths.tolist()])
        start = (width - lengths[index] + before)[:, None]
        return cls(index, first, lengths, mask, start + mask.cumsum(-1) - 1, width)

    @property
    def last(self) -> Tensor:
        """(B, T) bool: the last sampled token of each trajectory."""
        return self.loss_mask & (self.columns == self.width - 1)

    def total(self, rows: Tensor) -> Tensor:
        """(B,) of rows to their sums over each trajectory, (N,)."""
        return rows.new_zeros(len(self.first)).index_add(0, self.index, rows)

    def spread(self, values: Tensor) -> Tensor:
        """(N,) of trajectories to (B,) of rows."""
        return values[self.index]

    def gather(self, column: Tensor, padding: int = 0) -> Tensor:
        """(B, T) to (N, S): the sampled tokens of each trajectory in one row, in the order of
        playing, padded on the left. All trajectories end in the last column."""
        result = column.new_full((len(self.first), self.width), padding)
        result[self._tokens] = column[self.loss_mask]
        return result

    def scatter(self, values: Tensor) -> Tensor:
        """The inverse of ``gather``: (N, S) to (B, T), 0 on tokens that were not sampled."""
        result = values.new_zeros(self.loss_mask.shape)
        result[self.loss_mask] = values[self._tokens]
        return result

    @property
    def _tokens(self) -> tuple[Tensor, Tensor]:
        owners = self.index[:, None].expand_as(self.loss_mask)
        return owners[self.loss_mask], self.columns[self.loss_mask]


@dataclass(frozen=True)
class Outcomes:
    """What became of each trajectory, for all that compares trajectories; (N,) each. Baselines,
    group sizes and statistics count those that are ``valid``."""

    rewards: Tensor  # as the reward source gave them; an estimator gets them shaped
    group_ids: Tensor  # equal for siblings of one prompt
    lengths: Tensor  # sampled tokens in all rows
    truncated: Tensor  # bool
    passed: Tensor  # in [0, 1], NaN where unknown
    sources: list[str]
    parts: dict[str, Tensor]  # named components of the reward
    invalid_actions: Tensor | None
    difficulty: Tensor | None
    greedy_rewards: Tensor | None

    @classmethod
    def of(cls, batch: ExperienceBatch) -> Self:
        trajectories = Trajectories.of(batch)
        first = trajectories.first

        def of_first(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[first]

        return cls(
            rewards=batch.rewards[first],
            group_ids=batch.group_ids[first],
            lengths=trajectories.lengths,
            truncated=batch.truncated[first],
            passed=batch.passed[first],
            sources=[batch.sources[row] for row in first.tolist()],
            parts={name: part[first] for name, part in (batch.reward_parts or {}).items()},
            invalid_actions=of_first(batch.invalid_actions),
            difficulty=of_first(batch.difficulty),
            greedy_rewards=of_first(batch.greedy_rewards),
        )

    @property
    def valid(self) -> Tensor:
        """(N,) bool: has a sampled token; a failed trajectory has none."""
        return self.lengths > 0

    def siblings(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, unbiased std and number of ``values`` (N,) in each trajectory's group, float64."""
        return grouped_moments(values, self.group_ids, self.valid)

    def standardised(self, values: Tensor) -> Tensor:
        """``values`` (N,) minus the group's mean, divided by its std; see ``standardise``."""
        return standardise(values, self.group_ids, self.valid)


@dataclass(frozen=True)
class SampledTokens:
    """What an estimator sees of tokens, ``Trajectories.gather``ed; (N, S) each. Environment tokens
    are not there, so a formula needs no mask; what it leaves on the padding is never read."""

    rewards: Tensor  # 0 on padding
    values: Tensor | None
    turn_ids: Tensor  # int64, rising along the trajectory, -1 on padding
    segment_ids: Tensor  # int64, rising along the trajectory, -1 on padding

    @classmethod
    def of(cls, batch: ExperienceBatch, trajectories: Trajectories) -> Self:
        gather = trajectories.gather
        rows = torch.arange(len(batch))[:, None]
        # a turn is a run of sampled tokens: row by row, numbers that no earlier row has
        turns = rows * batch.loss_mask.shape[1] + batch.turn_ids
        return cls(
            rewards=gather(batch.token_rewards),
            values=None if batch.values is None else gather(batch.values),
            turn_ids=gather(turns, -1),
            segment_ids=gather(rows.expand_as(batch.loss_mask), -1),
        )
