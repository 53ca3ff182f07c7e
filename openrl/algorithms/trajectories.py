"""The rows of a batch seen as trajectories: what each earned, and its sampled tokens in one row.

The B rows belong to N trajectories; S is the largest number of sampled tokens in a trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
        order = index.argsort(stable=True)  # rows, grouped by trajectory
        first = order[index.bincount().cumsum(0) - index.bincount()]
        # tokens in the trajectory's earlier rows and in all trajectories before it
        earlier = torch.empty_like(sampled)
        earlier[order] = sampled[order].cumsum(0) - sampled[order]
        before = earlier - (lengths.cumsum(0) - lengths)[index]
        return cls(index, first, lengths, before, batch.loss_mask)

    @property
    def last(self) -> Tensor:
        """Return (B, T) bool, True on the last sampled token of each trajectory."""
        sampled = self.loss_mask.sum(-1)
        ends = (sampled > 0) & (self.before + sampled == self.lengths[self.index])
        last = self.loss_mask.shape[1] - 1 - self.loss_mask.flip(-1).int().argmax(-1)
        result = torch.zeros_like(self.loss_mask)
        result[ends, last[ends]] = True
        return result

    def total(self, rows: Tensor) -> Tensor:
        """Sum (B,) values of rows over each trajectory, (N,)."""
        return rows.new_zeros(len(self.first)).index_add(0, self.index, rows)

    def spread(self, values: Tensor) -> Tensor:
        """Copy each trajectory's value, (N,), to its rows, (B,)."""
        return values[self.index]

    def gather(self, column: Tensor, padding: int = 0) -> Tensor:
        """Gather the sampled tokens of each trajectory into one row, (B, T) to (N, S), in playing
        order and padded on the left. All trajectories end in the last column."""
        result = column.new_full((len(self.first) * self.width,), padding)
        result[self._places] = column.masked_select(self.loss_mask)
        return result.view(len(self.first), self.width)

    def scatter(self, values: Tensor) -> Tensor:
        """Invert ``gather``: (N, S) to (B, T), 0 on tokens that were not sampled."""
        result = values.new_zeros(self.loss_mask.shape)
        return result.masked_scatter_(self.loss_mask, values.flatten()[self._places])

    @cached_property
    def width(self) -> int:
        """S, but at least 1."""
        return max([1, *self.lengths.tolist()])

    @cached_property
    def _places(self) -> Tensor:
        """Where ``gather`` puts each sampled token, in row order."""
        sampled = self.loss_mask.sum(-1)
        start = self.index * self.width + self.width - self.lengths[self.index] + self.before
        begin = start - (sampled.cumsum(0) - sampled)
        return begin.repeat_interleave(sampled) + torch.arange(int(sampled.sum()))


@dataclass(frozen=True)
class TrajectoryRewards:
    """The outcome of each trajectory, for everything that compares trajectories; (N,) each.
    Baselines, group sizes and statistics count the ``valid`` ones."""

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
    agents: list[str]  # who played it; "" where nobody shares the episode
    episodes: Tensor  # int64, number of the episode in its group
    # of each role "source/agent", what it earned in earlier batches; estimators may move it
    role_means: dict[str, float] = field(default_factory=dict)

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
            agents=[batch.agents[row] if batch.agents else "" for row in first.tolist()],
            episodes=first if batch.episodes is None else batch.episodes[first],
        )

    @property
    def valid(self) -> Tensor:
        """(N,) bool: whether the trajectory has a sampled token; a failed one has none."""
        return self.lengths > 0

    def group_moments(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, unbiased std and number of ``values`` (N,) in each group, in float64."""
        return grouped_moments(values, self.group_ids, self.valid)

    def standardised(self, values: Tensor) -> Tensor:
        """Return ``values`` (N,) standardised within their groups."""
        return standardise(values, self.group_ids, self.valid)


class SampledTokens:
    """The tokens that an estimator sees, ``Trajectories.gather``ed; (N, S) each. Environment tokens
    are left out, so a formula needs no mask; nobody reads what it leaves on the padding."""

    def __init__(self, batch: ExperienceBatch, trajectories: Trajectories) -> None:
        self.batch, self.trajectories = batch, trajectories

    @cached_property
    def rewards(self) -> Tensor:
        """Token rewards, 0 on padding."""
        return self.trajectories.gather(self.batch.token_rewards)

    @cached_property
    def values(self) -> Tensor:
        """The critic's values."""
        return self.trajectories.gather(self.batch.values)

    @cached_property
    def score_norms(self) -> Tensor:
        """Squared norm of d log p / d logits under the policy before its update, 0 on padding."""
        batch = self.batch
        return self.trajectories.gather(1 - 2 * batch.old_logprobs.exp() + batch.squares)

    @cached_property
    def segment_ids(self) -> Tensor:
        """int64, rising along the trajectory; -1 on padding."""
        rows = torch.arange(len(self.batch))[:, None]
        return self.trajectories.gather(rows.expand_as(self.batch.loss_mask), -1)

    @cached_property
    def turn_ids(self) -> Tensor:
        """int64, rising along the trajectory, negative on padding."""
        of_row = self.trajectories.gather(self.batch.turn_ids, -1)
        return self.segment_ids * self.batch.loss_mask.shape[1] + of_row
