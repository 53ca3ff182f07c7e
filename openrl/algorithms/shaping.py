"""What shapes rewards and advantages, one function each. torch only.

The order in which they act is ``credit.assign_credit``'s, listed there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from openrl.algorithms.kl import reference_kl
from openrl.algorithms.masked import STD_EPS, grouped_moments, masked_mean, masked_std
from openrl.config.shaping import NormScope, RewardShapingFlags
from openrl.errors import UserError
from openrl.types import ExperienceBatch

MIN_STD = 1e-4  # whitening divides by at least this

# -- rewards of samples, (B,) ----------------------------------------------------------------------


def shape_rewards(batch: ExperienceBatch, flags: RewardShapingFlags, max_new_tokens: int) -> Tensor:
    """(B,) rewards after the penalties, before the clip range."""
    rewards, lengths = batch.rewards, batch.response_lengths
    if flags.format_penalty:
        if batch.invalid_actions is None:
            raise UserError(
                "--format_penalty: nothing says which answers could not be read",
                "a reward that returns extra_logs with 'action_is_valid', 0 or 1 for each answer",
            )
        rewards = rewards + flags.format_penalty * batch.invalid_actions
    if flags.len_reward_coef:
        low, high = flags.len_reward_range
        high = max_new_tokens if high is None else high
        rewards = rewards + flags.len_reward_coef * length_reward(
            lengths, low, high, flags.len_reward_type
        )
    if flags.overlong_buffer_len:
        penalty = overlong_penalty(lengths, max_new_tokens, flags.overlong_buffer_len)
        rewards = rewards - flags.overlong_penalty_factor * penalty
    if flags.stop_properly_penalty_coef is not None:
        rewards = stop_properly(rewards, batch.truncated, flags.stop_properly_penalty_coef)
    return rewards


def length_reward(lengths: Tensor, low: int, high: int, shape: str) -> Tensor:
    """1 up to ``low`` sampled tokens, 0 from ``high`` on; linear or half a cosine in between."""
    share = ((lengths - low) / (high - low)).clamp(0, 1)
    return 1 - share if shape == "linear" else (1 + torch.cos(math.pi * share)) / 2


def overlong_penalty(lengths: Tensor, max_new_tokens: int, buffer: int) -> Tensor:
    """0 up to ``max_new_tokens - buffer`` sampled tokens, then linear to 1 at the limit;
    DAPO, https://arxiv.org/abs/2503.14476 eq. 13."""
    return ((lengths - (max_new_tokens - buffer)) / buffer).clamp(0, 1)


def stop_properly(rewards: Tensor, truncated: Tensor, coef: float) -> Tensor:
    """Truncated samples: ``coef`` in [0, 1] scales a positive reward, ``coef`` < 0 is the most they
    get. No reward is raised."""
    reduced = (
        torch.minimum(rewards, torch.full_like(rewards, coef))
        if coef < 0
        else rewards.clamp(max=0) + coef * rewards.clamp(min=0)
    )
    return torch.where(truncated, reduced, rewards)


class RunningMoments:
    """Mean and unbiased std of every reward of the run so far, merged batch by batch (Chan et al.
    1979)."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def update(self, rewards: Tensor) -> None:
        """``rewards`` (n,) of one rollout batch."""
        if not len(rewards):
            return
        values = rewards.double()
        n, mean = len(values), float(values.mean())
        delta, total = mean - self.mean, self.count + n
        self.squares += float((values - mean).square().sum()) + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.count = total

    @property
    def std(self) -> float:
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def state(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.squares = int(state["count"]), state["mean"], state["squares"]


def normalise(
    scores: Tensor,
    batch: ExperienceBatch,
    mean_scope: NormScope,
    std_scope: NormScope,
    running: RunningMoments,
) -> Tensor:
    """(scores - mean) / (std + 1e-6), each over its own scope; (B,). ``running`` already counts
    these scores.

    0 where the std's scope has one member or equal rewards. A mean scope with one member gives 0 by
    itself."""
    result = scores.double()
    if mean_scope != "none":
        result = result - _moments(scores, batch, mean_scope, running)[0]
    if std_scope != "none":
        _, std, count = _moments(scores, batch, std_scope, running)
        result = torch.where((count > 1) & (std > STD_EPS), result / (std + STD_EPS), 0)
    return result.to(scores.dtype)


def _moments(
    scores: Tensor, batch: ExperienceBatch, scope: NormScope, running: RunningMoments
) -> tuple[Tensor, Tensor, Tensor]:
    if scope == "running":
        known = torch.tensor([running.mean, running.std, running.count], dtype=torch.float64)
        return tuple(known[:, None].expand(3, len(scores)))  # type: ignore[return-value]
    index = torch.zeros_like(batch.group_ids)
    if scope == "group":
        index = batch.group_ids
    elif scope == "datasource":
        numbers = {name: i for i, name in enumerate(dict.fromkeys(batch.sources))}
        index = torch.tensor([numbers[name] for name in batch.sources])
    return grouped_moments(scores, index, batch.members)


# -- rewards of tokens, (B, T) ---------------------------------------------------------------------


def place_scores(batch: ExperienceBatch, scores: Tensor) -> Tensor:
    """(B, T): each score on the row's last sampled token; rows without one get none.

    With process rewards these stay where they were earned and the last token gets the rest, so that
    a row still sums to its score."""
    mask = batch.loss_mask
    earned = torch.zeros(mask.shape, dtype=scores.dtype)
    if batch.process_rewards is not None:
        earned = batch.process_rewards.to(scores.dtype).masked_fill(~mask, 0)
    last = mask.shape[1] - 1 - mask.flip(-1).int().argmax(-1, keepdim=True)
    return earned.scatter_add(1, last, scores[:, None] - earned.sum(-1, keepdim=True)).masked_fill(
        ~mask, 0
    )


def token_rewards(batch: ExperienceBatch, kl_coef: float, kl_estimator: str) -> Tensor:
    """(B, T): ``batch.scores`` on the last sampled token, minus ``kl_coef`` times the KL to the
    reference on each."""
    rewards = place_scores(batch, batch.scores)
    if kl_coef:
        kl = reference_kl(batch, kl_estimator)
        if kl is None:
            raise ValueError(
                f"the KL in the reward by {kl_estimator!r} needs columns that were not filled"
            )
        rewards = rewards - kl_coef * kl.masked_fill(~batch.loss_mask, 0)
    return rewards


def whiten(values: Tensor, mask: Tensor, std_norm: bool = True) -> Tensor:
    """(B, T): minus the mean, divided by the (biased) std over the mask; 0 outside. Untouched with
    fewer than two masked tokens. ``std_norm`` False subtracts the mean only."""
    if int(mask.sum()) < 2:
        return values
    centred = (values - masked_mean(values, mask)).masked_fill(~mask, 0)
    return centred / masked_std(values, mask).clamp(min=MIN_STD) if std_norm else centred


# -- weights of samples in the loss, (B,) ----------------------------------------------------------


def loss_weights(batch: ExperienceBatch, flags: RewardShapingFlags) -> Tensor | None:
    """(B,) factors with mean 1 over the rollout batch's members; None if nothing weighs."""
    if not (flags.difficulty_loss_weight or flags.length_loss_weight):
        return None
    weights = torch.ones_like(batch.rewards)
    if flags.difficulty_loss_weight:
        weights = 0.5 + 1.5 * difficulty(batch, flags.difficulty_key).clamp(0, 1)
    if flags.length_loss_weight:
        lengths = batch.response_lengths[batch.members]
        low, high = (lengths.min(), lengths.max()) if len(lengths) else (0, 0)
        weights = weights * (1.5 - (batch.response_lengths - low) / max(float(high - low), 1e-8))
    return weights / masked_mean(weights, batch.members).clamp(min=1e-8)


def difficulty(batch: ExperienceBatch, key: str) -> Tensor:
    """(B,) in [0, 1]: the data's column, or with key "auto" 1 - the pass rate of the row's
    group."""
    if key != "auto":
        return _required(batch.difficulty, "difficulty")
    if bool(batch.passed[batch.members].isnan().any()):
        raise UserError(
            "--difficulty_key auto: the reward gave no verdict on some samples, so their pass rate"
            " is not known",
            "a reward that returns scores in [0, 1], or a column of the data",
        )
    return (1 - grouped_moments(batch.passed.nan_to_num(), batch.group_ids, batch.members)[0]).to(
        batch.rewards.dtype
    )


def _required(column: Any, name: str) -> Any:
    if column is None:
        raise ValueError(f"the batch has no {name}")
    return column
