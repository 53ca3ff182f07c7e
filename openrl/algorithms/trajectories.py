"""The rows of a batch seen as trajectories: what was earned, and all sampled tokens in one row.
torch only.

N trajectories of B rows; S is the most tokens that were sampled in one trajectory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self

from openrl.algorithms.masked import grouped_moments, standardise
from openrl.experience import ExperienceBatch
from openrl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Trajectories:
    """Which rows and which sampled tokens belong to which trajectory."""

    index: Tensor  # (B,) int64, the row's trajectory
    first: Tensor  # (N,) int64, each trajectory's first row
    lengths: Tensor  # (N,) int64, sampled tokens in all rows
    before: Tensor  # (B,) int64, sampled tokens in the trajectory's earlier rows
    loss_mask: Tensor  # (B, T) bool

    @classmethod
    def of(cls, batch: ExperienceBatch) -> Self:
        ids, index = batch.trajectory_ids.unique(return_inverse=True)
        sampled = batch.response_lengths
        lengths = torch.zeros_like(ids).index_add(0, index, sampled)
        order = index.argsort(stable=True)  # rows, those of a trajectory one behind the other
        first = order[index.bincount().cumsum(0) - index.bincount()]
        earlier = torch.empty_like(sampled)  # of the row's own trajectory, and all before that one
        earlier[order] = sampled[order].cumsum(0) - sampled[order]
        before = earlier - (lengths.cumsum(0) - lengths)[index]
        return cls(index, first, lengths, before, batch.loss_mask)

    @property
    def last(self) -> Tensor:
        """(B, T) bool: the last sampled token of each trajectory."""
        sampled = self.loss_mask.sum(-1)
        ends = (sampled > 0) & (self.before + sampled == self.lengths[self.index])
        last = self.loss_mask.shape[1] - 1 - self.loss_mask.flip(-1).int().argmax(-1)
        result = torch.zeros_like(self.loss_mask)
        result[ends, last[ends]] = True
        return result

    def total(self, rows: Tensor) -> Tensor:
        """(B,) of rows to their sums over each trajectory, (N,)."""
        return rows.new_zeros(len(self.first)).index_add(0, self.index, rows)

    def spread(self, values: Tensor) -> Tensor:
        """(N,) of trajectories to (B,) of rows."""
        return values[self.index]

    def gather(self, column: Tensor, padding: int = 0) -> Tensor:
        """(B, T) to (N, S): the sampled tokens of each trajectory in one row, in the order of
        playing, padded on the left. All trajectories end in the last column."""
        result = column.new_full((len(self.first) * self.width,), padding)
        result[self._places] = column.masked_select(self.loss_mask)
        return result.view(len(self.first), self.width)

    def scatter(self, values: Tensor) -> Tensor:
        """The inverse of ``gather``: (N, S) to (B, T), 0 on tokens that were not sampled."""
        result = values.new_zeros(self.loss_mask.shape)
        return result.masked_scatter_(self.loss_mask, values.flatten()[self._places])

    @cached_property
    def width(self) -> int:
        """S, at least 1."""
        return max([1, *self.lengths.tolist()])

    @cached_property
    def _places(self) -> Tensor:
        """Where ``gather`` puts each sampled token, in the order in which they stand in rows."""
        sampled = self.loss_mask.sum(-1)
        start = self.index * self.width + self.width - self.lengths[self.index] + self.before
        of_row = torch.arange(int(sampled.sum())) - (sampled.cumsum(0) - sampled).repeat_interleave(
            sampled
        )
        return start.repeat_interleave(sampled) + of_row


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


class SampledTokens:
    """What an estimator sees of tokens, ``Trajectories.gather``ed; (N, S) each. Environment tokens
    are not there, so a formula needs no mask; what it leaves on the padding is never read."""

    def __init__(self, batch: ExperienceBatch, trajectories: Trajectories) -> None:
        self.batch, self.trajectories = batch, trajectories

    @cached_property
    def rewards(self) -> Tensor:
        """0 on padding."""
        return self.trajectories.gather(self.batch.token_rewards)

    @cached_property
    def values(self) -> Tensor:
        """The critic's."""
        return self.trajectories.gather(self.batch.values)

    @cached_property
    def segment_ids(self) -> Tensor:
        """int64, rising along the trajectory, -1 on padding."""
        rows = torch.arange(len(self.batch))[:, None]
        return self.trajectories.gather(rows.expand_as(self.batch.loss_mask), -1)

    @cached_property
    def turn_ids(self) -> Tensor:
        """int64, rising along the trajectory, below 0 on padding; a turn is a run of sampled
        tokens."""
        of_row = self.trajectories.gather(self.batch.turn_ids, -1)
        return self.segment_ids * self.batch.loss_mask.shape[1] + of_row
