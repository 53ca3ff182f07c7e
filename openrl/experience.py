"""The tensors of a training step, and the views of them that losses receive.

B is the number of rows in a batch, T their padded length. A per-token field describes the token at
its own index, as in ``openrl.types``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from openrl.lazy import torch
from openrl.token_origins import KeptSets, Routes
from openrl.types import PlacedImage

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class TokenBatch:
    """Rows of tokens to train on, right padded. Losses that learn from text alone need no more."""

    token_ids: Tensor  # (B, T) int64
    attention_mask: Tensor  # (B, T) bool, False on padding
    loss_mask: Tensor  # (B, T) bool, True for trained tokens
    trajectory_ids: Tensor  # (B,) int64, equal for the segments of one trajectory, in their order
    group_ids: Tensor  # (B,) int64, equal for siblings of one prompt
    images: list[tuple[PlacedImage, ...]] | None = None  # (B,) images of each row; None: no images
    # (B,) int64, trained tokens in all rows of the row's trajectory
    trajectory_tokens: Tensor | None = None
    # a teacher's distributions: (B, T, K) int32, its K likeliest tokens at position t
    teacher_ids: Tensor | None = None
    # (B, T, K + 1) their log-probs, then that of all other tokens together
    teacher_support: Tensor | None = None
    # (B, T, H) alternatively, for the whole distribution: the hidden state that predicts token t
    teacher_hidden: Tensor | None = None
    # (B, T) bool, tokens that somebody else wrote after the row's first trained one; None: unmarked
    observed: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        for f in fields(self):
            value = getattr(self, f.name)
            for column in value.values() if isinstance(value, dict) else [value]:
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
        """Number of real tokens in each row, (B,)."""
        return self.attention_mask.sum(-1)

    @property
    def response_lengths(self) -> Tensor:
        """Number of sampled tokens in each row, (B,)."""
        return self.loss_mask.sum(-1)

    @property
    def valid(self) -> Tensor:
        """Whether each row has a trained token, (B,) bool. Dummy rows and rows of failed
        trajectories have none."""
        return self.loss_mask.any(-1)

    def trajectory_sums(self, rows: Tensor) -> Tensor:
        """Sum the values of ``rows``, (B,), over each trajectory. Returns (B,): every row holds the
        sum of its trajectory."""
        _, index = self.trajectory_ids.unique(return_inverse=True)
        return rows.new_zeros(len(rows)).index_add(0, index, rows)[index]

    def distributions(
        self, other: Literal["reference", "teacher", "rollout"]
    ) -> tuple[Tensor, ...]:
        """Return the filled columns that hold the distributions of the reference, the teacher or
        the engine."""
        prefix = {"reference": "ref", "teacher": "teacher", "rollout": "rollout"}[other]
        names = (f"{prefix}_{what}" for what in ("ids", "support", "hidden"))
        columns = (getattr(self, name, None) for name in names)
        return tuple(column for column in columns if column is not None)

    def replace(self, **columns: Any) -> Self:
        return replace(self, **columns)

    def to(self, device: torch.device) -> Self:
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {n: c.to(device) for n, c in columns.items() if isinstance(c, torch.Tensor)}
        return replace(self, **moved)

    def select(self, rows: list[int]) -> Self:
        """Return the given rows, cut to the longest of them. Row -1 is a dummy: one token, nothing
        to train.

        Dummies keep every rank at the same number of collectives when rows run out. Fills
        ``trajectory_tokens`` if it is still empty, because a selection may lack some rows of a
        trajectory.
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
            elif isinstance(value, dict):
                columns[f.name] = {name: part[index] for name, part in value.items()}
            elif isinstance(value, list):
                columns[f.name] = [value[i] for i in index.tolist()]
            else:
                columns[f.name] = value
        if self.images is not None:  # a dummy row no longer has its image tokens
            columns["images"] = [self.images[r] if r >= 0 else () for r in rows]
        if self.trajectory_tokens is None:
            columns["trajectory_tokens"] = self.trajectory_sums(self.response_lengths)[index]
        columns["loss_mask"] = columns["loss_mask"] & ~dummy[:, None]
        if self.observed is not None:
            columns["observed"] = columns["observed"] & ~dummy[:, None]
        columns["attention_mask"] = columns["attention_mask"] & ~dummy[:, None]
        columns["attention_mask"][dummy, 0] = True  # attention kernels fail on a row without tokens
        return type(self)(**columns)


@dataclass(kw_only=True)
class ExperienceBatch(TokenBatch):
    """The tensors of one step of reinforcement learning. ``loss_mask`` marks the tokens that the
    policy sampled. Each field is filled once, in about their order."""

    rollout_logprobs: Tensor  # (B, T) float32, from the engine that sampled
    rewards: Tensor  # (B,) float32, raw from the reward source; never overwritten
    truncated: Tensor  # (B,) bool, the response ran out of tokens
    passed: Tensor  # (B,) float32 in [0, 1], NaN where unknown
    turn_ids: Tensor  # (B, T) int64, turn of each sampled token, -1 outside loss_mask
    sources: list[str]  # (B,) data source of each row
    agents: list[str] | None = None  # (B,) who played the row, where several share an episode
    episodes: Tensor | None = None  # (B,) int64, number of the row's episode in its prompt's group
    invalid_actions: Tensor | None = None  # (B,) turns whose action could not be parsed
    difficulty: Tensor | None = None  # (B,) in [0, 1], from the data
    # (B, T) the part of ``rewards`` earned before the end, at the tokens that earned it
    process_rewards: Tensor | None = None
    reward_parts: dict[str, Tensor] | None = None  # name -> (B,) components of the reward
    # (B,) reward of the greedy answer to the row's prompt; NaN if it has none
    greedy_rewards: Tensor | None = None
    state_ids: Tensor | None = None  # (B,) int64, equal for rows that answer equal observations
    # (B, T) int32, the sync whose weights sampled the token; -1 outside loss_mask
    versions: Tensor | None = None
    # (B,) what each token of the row was drawn from; None: everything from the whole vocabulary
    kept: list[KeptSets | None] | None = None
    # (B,) the experts of each token of the row, for passes of the policy; None: it chooses anew
    routes: list[Routes | None] | None = None
    old_logprobs: Tensor | None = None  # (B, T) of the policy before this step's update
    squares: Tensor | None = None  # (B, T) sum of squares of the old policy's distributions
    entropy: Tensor | None = None  # (B, T) of the old policy's distributions, in nats
    ref_logprobs: Tensor | None = None  # (B, T) of the frozen reference model
    # the reference model's distributions, as those of a teacher
    ref_ids: Tensor | None = None
    ref_support: Tensor | None = None
    ref_hidden: Tensor | None = None
    # those of the engine, which lists its likeliest tokens for some losses
    rollout_ids: Tensor | None = None
    rollout_support: Tensor | None = None
    teacher_logprobs: Tensor | None = None  # (B, T) of the teacher
    teacher_weights: Tensor | None = None  # (B,) factor on what each row learns from it; None: 1
    full_kl: Tensor | None = None  # (B, T) KL of the old policy's distribution to the reference's
    values: Tensor | None = None  # (B, T) from the critic
    shaped: Tensor | None = None  # (B,) rewards after shaping, before any baseline
    scores: Tensor | None = None  # (B,) what the estimator computes from ``shaped``
    # (B, T) score on the last sampled token, minus any KL penalty
    token_rewards: Tensor | None = None
    advantages: Tensor | None = None  # (B, T) zero outside loss_mask
    returns: Tensor | None = None  # (B, T) the critic's target
    loss_weights: Tensor | None = None  # (B,) factor on each row's policy loss
    kl_weights: Tensor | None = None  # (B,) factor on each row's KL loss; None: 1
    # (B, T) factor on each token's policy loss: importance weight of trainer against engine
    is_weights: Tensor | None = None
    selected: Tensor | None = None  # (B, T) bool, tokens that a SelectingLoss treats separately
    # (B,) int64, the number of a row on whose tokens the update reports; -1: it does not
    traced: Tensor | None = None


@dataclass(kw_only=True)
class PreferenceBatch(TokenBatch):
    """Answers that were compared in pairs or rated one by one. A pair is two adjacent rows, the
    chosen answer first."""

    passed: Tensor  # (B,) 1 for the better answer, 0 for the worse; NaN: to estimate a KL from
    # (B,) how much better the chosen answer of the row's pair is, from the data
    margins: Tensor | None = None
    ref_answers: Tensor | None = None  # (B,) log-prob of the whole answer under the reference model
    kl: Tensor | None = None  # (B,) KTO's KL to the reference model: one number per step, repeated


@dataclass(frozen=True)
class StepCounts:
    """What one optimizer step trains, over all ranks and micro-batches. Losses divide by nothing
    else."""

    tokens: int  # trained tokens
    trajectories: int  # with a trained token; for preferences: pairs, or rated answers
    dp_size: int  # data-parallel ranks; undoes the mean that DDP and ZeRO take over them
    # those of ``tokens`` in rows that no rank computes, because no loss term has a gradient there
    zero_gradient_tokens: int = 0
    observed: int = 0  # tokens in ``TokenBatch.observed``


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step as one rank sees it."""

    micro_batches: list[list[int]]  # row indices into the rank's shard; -1 is a dummy row
    counts: StepCounts


@dataclass(frozen=True)
class LossInputs:
    """What a policy loss sees of one micro-batch of b rows. Tensors are (b, T) where not noted."""

    logprobs: Tensor  # of the current policy; carries the gradient
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor  # bool
    turn_ids: Tensor  # int64
    rewards: Tensor  # (b,) raw from the reward source
    selected: Tensor | None = None  # bool, tokens that a SelectingLoss treats separately
    # KL of the engine's distributions to the current policy's, with gradient, for losses that need
    # "rollout_kl"
    rollout_kl: Tensor | None = None


@dataclass(frozen=True)
class TokenLosses:
    """What a policy loss returns. The caller masks, sums and divides by the counts of the whole
    step."""

    per_token: Tensor  # (b, T)
    # (b, T) each; logged as their mean over trained tokens
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class AnswerInputs:
    """What a preference loss sees of one micro-batch of b whole answers. Pairs are adjacent rows;
    tensors are (b,)."""

    logprobs: Tensor  # sum over the answer's tokens; carries the gradient
    mean_logprobs: Tensor  # mean over the answer's tokens
    ref_logprobs: Tensor  # sum under the reference model; 0 without one
    passed: Tensor  # 1 for the better answer, 0 for the worse
    beta: float
    kl: Tensor | None = None  # KL to the reference model, for losses on rated answers

    @property
    def log_ratios(self) -> Tensor:
        return self.logprobs - self.ref_logprobs


@dataclass(frozen=True)
class AnswerLosses:
    """What a preference loss returns. The caller leaves dummy rows out, sums and divides by the
    counts of the whole step."""

    losses: Tensor  # (b / 2,) for pairs, (b,) for rated answers
    rewards: Tensor  # (b,) the policy's implicit rewards, which the loss compares
