"""The tensors of a training step, and what losses see of them.

Letters: B sequences of a batch, T padded length; a per-token field describes the token at its own
index, see ``openrl.types``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

from openrl.lazy import torch
from openrl.types import PlacedImage

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class ExperienceBatch:
    """The tensors of one training step, right padded. Filled once each, from top to bottom."""

    token_ids: Tensor  # (B, T) int64
    attention_mask: Tensor  # (B, T) bool, False on padding
    loss_mask: Tensor  # (B, T) bool, True on tokens the policy sampled
    rollout_logprobs: Tensor  # (B, T) float32, from the engine that sampled
    trajectory_ids: Tensor  # (B,) int64, equal for the segments of one trajectory, in their order
    group_ids: Tensor  # (B,) int64, equal for siblings of one prompt
    rewards: Tensor  # (B,) float32, as the reward source gave them; never overwritten
    truncated: Tensor  # (B,) bool, the response ran out of tokens
    passed: Tensor  # (B,) float32 in [0, 1], NaN where unknown
    turn_ids: Tensor  # (B, T) int64, turn of each sampled token, -1 outside loss_mask
    sources: list[str]  # (B,) data source of each row
    images: list[tuple[PlacedImage, ...]] | None = None  # (B,) those of each row; None: no row's
    invalid_actions: Tensor | None = None  # (B,) turns whose action could not be parsed
    difficulty: Tensor | None = None  # (B,) in [0, 1], from the data
    # (B, T) the part of ``rewards`` earned on the way, at the tokens that earned it
    process_rewards: Tensor | None = None
    reward_parts: dict[str, Tensor] | None = None  # name -> (B,) components of the reward
    # (B,) reward of the greedy answer to the row's prompt; NaN if it has none
    greedy_rewards: Tensor | None = None
    state_ids: Tensor | None = None  # (B,) int64, equal for rows that answer an equal observation
    # (B, T) int32, the publish whose weights sampled a token; -1 outside loss_mask
    versions: Tensor | None = None
    old_logprobs: Tensor | None = None  # (B, T) the policy before this step's update
    ref_logprobs: Tensor | None = None  # (B, T) the frozen reference
    # (B, T, K) int32, the reference's likeliest tokens in the place of token t
    ref_ids: Tensor | None = None
    # (B, T, K + 1) their log-probs, and that of all other tokens together
    ref_support: Tensor | None = None
    # (B, T, H) or, for its whole distribution, what it predicts token t from
    ref_hidden: Tensor | None = None
    full_kl: Tensor | None = None  # (B, T) KL of the old policy's distribution to the reference's
    values: Tensor | None = None  # (B, T) the critic
    shaped: Tensor | None = None  # (B,) rewards after shaping, before any baseline
    scores: Tensor | None = None  # (B,) what the estimator made of them
    # (B, T) score on the last sampled token, minus any KL penalty
    token_rewards: Tensor | None = None
    advantages: Tensor | None = None  # (B, T) zero outside loss_mask
    returns: Tensor | None = None  # (B, T) the critic's target
    loss_weights: Tensor | None = None  # (B,) factor of each row's policy loss
    # (B, T) factor of each token's policy loss that corrects for the engine's policy
    is_weights: Tensor | None = None
    # (B,) int64, trained tokens in all rows of the row's trajectory
    trajectory_tokens: Tensor | None = None
    selected: Tensor | None = None  # (B, T) bool, tokens that a SelectingLoss treats apart

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        for f in fields(self):
            value = getattr(self, f.name)
            for column in value.values() if f.name == "reward_parts" and value else [value]:
                if isinstance(column, torch.Tensor) and column.shape[:2] != shape[: column.dim()]:
                    raise ValueError(
                        f"{f.name} has shape {tuple(column.shape)}, token_ids {tuple(shape)}"
                    )
        if bool(self.loss_mask[:, :1].any()):
            raise ValueError("loss_mask[:, 0] must be False: the first token has no prediction")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def lengths(self) -> Tensor:
        """(B,) real tokens of each row."""
        return self.attention_mask.sum(-1)

    @property
    def response_lengths(self) -> Tensor:
        """(B,) sampled tokens of each row."""
        return self.loss_mask.sum(-1)

    @property
    def valid(self) -> Tensor:
        """(B,) bool: has a trained token; dummies and rows of failed trajectories have none."""
        return self.loss_mask.any(-1)

    def trajectory_sums(self, rows: Tensor) -> Tensor:
        """(B,) of rows to the sums over their trajectories, on each row of these; (B,)."""
        _, index = self.trajectory_ids.unique(return_inverse=True)
        return rows.new_zeros(len(rows)).index_add(0, index, rows)[index]

    @property
    def reference(self) -> tuple[Tensor, ...]:
        """The columns that hold the reference's distributions."""
        columns = (self.ref_ids, self.ref_support, self.ref_hidden)
        return tuple(column for column in columns if column is not None)

    def replace(self, **columns: Any) -> Self:
        return replace(self, **columns)

    def select(self, rows: list[int]) -> Self:
        """The given rows, cut to their longest. Row -1 is a dummy: one token, nothing to train.

        Dummies keep every rank at the same number of collectives when rows run out.
        ``trajectory_tokens`` is filled now if nobody has: the other rows may not be among these.
        """
        index = torch.tensor([max(r, 0) for r in rows], dtype=torch.long)
        dummy = torch.tensor([r < 0 for r in rows], dtype=torch.bool)
        lengths = self.attention_mask[index].sum(-1).masked_fill(dummy, 1)
        width = max(1, int(lengths.max())) if rows else 1
        columns: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, torch.Tensor):
                columns[f.name] = value[index][:, :width] if value.dim() > 1 else value[index]
            elif f.name == "reward_parts" and value is not None:
                columns[f.name] = {name: part[index] for name, part in value.items()}
            else:
                columns[f.name] = (
                    [value[i] for i in index.tolist()] if isinstance(value, list) else value
                )
        if self.images is not None:  # a dummy has lost the tokens of its images
            columns["images"] = [self.images[r] if r >= 0 else () for r in rows]
        if self.trajectory_tokens is None:
            columns["trajectory_tokens"] = self.trajectory_sums(self.response_lengths)[index]
        columns["loss_mask"] = columns["loss_mask"] & ~dummy[:, None]
        columns["attention_mask"] = columns["attention_mask"] & ~dummy[:, None]
        columns["attention_mask"][dummy, 0] = True  # a row without tokens breaks attention kernels
        return type(self)(**columns)


@dataclass
class PreferenceBatch(ExperienceBatch):
    """Answers that somebody compared or rated; ``passed`` is 1 for the better, 0 for the worse.

    A pair is two adjacent rows, the chosen answer first.
    """

    # (B,) by how much the chosen answer of the row's pair is better, from the data
    margins: Tensor | None = None
    ref_answers: Tensor | None = None  # (B,) log-prob of the whole answer under the reference
    kl: Tensor | None = None  # (B,) KTO's KL to the reference: one number, on every row of the step


@dataclass(frozen=True)
class StepCounts:
    """What one optimizer step trains, over all ranks and micro-batches: the only denominators."""

    tokens: int  # trained tokens
    trajectories: int  # with at least one trained token; of preferences: pairs, or rated answers
    dp_size: int  # data-parallel ranks; undoes the mean that DDP and ZeRO take over them
    left_out: int = 0  # of ``tokens``, those of rows without a gradient, which no rank computes


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step as one rank sees it."""

    micro_batches: list[list[int]]  # rows of the rank's shard, -1 is a dummy row
    counts: StepCounts


@dataclass(frozen=True)
class LossInputs:
    """What a policy loss sees of one micro-batch; every tensor is (b, T)."""

    logprobs: Tensor  # current policy, carries the gradient
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor  # bool
    turn_ids: Tensor  # int64
    rewards: Tensor  # (b,) as the reward source gave them
    selected: Tensor | None = None  # bool, tokens that a SelectingLoss treats apart


@dataclass(frozen=True)
class TokenLosses:
    """What a policy loss returns; the caller masks, sums and divides by counts of the whole
    step."""

    per_token: Tensor  # (b, T)
    # (b, T) each, averaged over trained tokens
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class AnswerInputs:
    """What a preference loss sees of one micro-batch: b answers as wholes, pairs as adjacent rows;
    tensors are (b,)."""

    logprobs: Tensor  # sum over the answer's tokens; carries the gradient
    mean_logprobs: Tensor  # mean over the answer's tokens
    ref_logprobs: Tensor  # sum under the reference; 0 without one
    passed: Tensor  # 1 for the better answer, 0 for the worse
    beta: float
    kl: Tensor | None = None  # KL to the reference, for losses of rated answers

    @property
    def log_ratios(self) -> Tensor:
        return self.logprobs - self.ref_logprobs


@dataclass(frozen=True)
class AnswerLosses:
    """What a preference loss returns; the caller leaves dummies out, sums and divides by the whole
    step."""

    losses: Tensor  # (b / 2,) of pairs, (b,) of rated answers
    rewards: Tensor  # (b,) what the loss compares: the policy's implicit rewards


@dataclass(frozen=True)
class ParallelLayout:
    """How the ranks of one training engine divide the work.

    Rows are dealt to data-parallel ranks. Each is a block of neighbours that get the same rows:
    sp_size ranks that hold a part of every sequence each, each of these tp_size ranks that hold a
    part of every layer each."""

    rank: int = 0
    world_size: int = 1
    sp_size: int = 1
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size % self.ranks_per_shard:
            raise ValueError(
                f"{self.world_size} ranks are no multiple of sp {self.sp_size} * tp {self.tp_size}"
            )

    @property
    def ranks_per_shard(self) -> int:
        """Neighbours that get the same rows."""
        return self.sp_size * self.tp_size

    @property
    def dp_size(self) -> int:
        return self.world_size // self.ranks_per_shard

    @property
    def dp_rank(self) -> int:
        return self.rank // self.ranks_per_shard

    @property
    def sp_rank(self) -> int:
        return self.rank // self.tp_size % self.sp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    def sequence_groups(self) -> list[list[int]]:
        """The ranks that hold one row's sequence together, in the order of its parts; every rank is
        in one."""
        blocks = range(0, self.world_size, self.ranks_per_shard)
        return [
            list(range(first + tp, first + self.ranks_per_shard, self.tp_size))
            for first in blocks
            for tp in range(self.tp_size)
        ]
