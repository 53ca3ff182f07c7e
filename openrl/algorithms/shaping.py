"""Shaping of rewards and advantages, one function for each kind.

``credit.compute_advantages`` lists the order in which they act.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from openrl.algorithms.kl import reference_kl
from openrl.algorithms.masked import STD_EPS, grouped_moments, masked_mean, masked_std
from openrl.algorithms.trajectories import Trajectories, TrajectoryRewards
from openrl.config.groups.reward_shaping import NormScope, RewardShapingFlags
from openrl.errors import UserError
from openrl.experience import ExperienceBatch
from openrl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

MIN_STD = 1e-4  # whitening divides by at least this

# -- rewards of trajectories, (N,) -----------------------------------------------------------------


def shape_rewards(
    outcomes: TrajectoryRewards, flags: RewardShapingFlags, max_new_tokens: int
) -> Tensor:
    """Return (N,) rewards after the penalties, before the clip range."""
    rewards, lengths = outcomes.rewards, outcomes.lengths
    if flags.format_penalty:
        if outcomes.invalid_actions is None:
            raise UserError(
                "--format_penalty: nothing says which answers could not be read",
                "a reward that returns extra_logs with 'action_is_valid', 0 or 1 for each answer",
            )
        rewards = rewards + flags.format_penalty * outcomes.invalid_actions
    if flags.len_reward_coef:
        low, high = flags.len_reward_range
        high = max_new_tokens if high is None else high
        earned = length_reward(lengths, low, high, flags.len_reward_type)
        rewards = rewards + flags.len_reward_coef * earned
    if flags.overlong_buffer_len:
        penalty = overlong_penalty(lengths, max_new_tokens, flags.overlong_buffer_len)
        rewards = rewards - flags.overlong_penalty_factor * penalty
    if flags.stop_properly_penalty_coef is not None:
        rewards = stop_properly(rewards, outcomes.truncated, flags.stop_properly_penalty_coef)
    return rewards


def length_reward(lengths: Tensor, low: int, high: int, shape: str) -> Tensor:
    """Return 1 up to ``low`` sampled tokens, 0 from ``high`` on, and a straight line or half a
    cosine in between."""
    share = ((lengths - low) / (high - low)).clamp(0, 1)
    return 1 - share if shape == "linear" else (1 + torch.cos(math.pi * share)) / 2


def overlong_penalty(lengths: Tensor, max_new_tokens: int, buffer: int) -> Tensor:
    """Return 0 up to ``max_new_tokens - buffer`` sampled tokens, then a straight line up to 1 at
    the limit; DAPO, https://arxiv.org/abs/2503.14476 eq. 13."""
    return ((lengths - (max_new_tokens - buffer)) / buffer).clamp(0, 1)


def stop_properly(rewards: Tensor, truncated: Tensor, coef: float) -> Tensor:
    """Reduce truncated rewards: ``coef`` in [0, 1] scales positive ones, below 0 caps all."""
    scaled = rewards.clamp(max=0) + coef * rewards.clamp(min=0)
    return torch.where(truncated, rewards.clamp(max=coef) if coef < 0 else scaled, rewards)


class RunningMoments:
    """What a run remembers of its rewards: their mean and unbiased std, merged batch by batch (Chan
    et al. 1979), and in ``role_means`` what estimators with roles keep."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        self.role_means: dict[str, float] = {}

    def update(self, rewards: Tensor) -> None:
        """Add the ``rewards`` (n,) of one rollout batch."""
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

    def state(self) -> dict[str, Any]:
        moments = {"count": self.count, "mean": self.mean, "squares": self.squares}
        return moments | {"role_means": {**self.role_means}}

    def load_state(self, state: dict[str, Any]) -> None:
        self.role_means = {**state.get("role_means", {})}
        self.count, self.mean, self.squares = int(state["count"]), state["mean"], state["squares"]


def normalise(
    outcomes: TrajectoryRewards,
    mean_scope: NormScope,
    std_scope: NormScope,
    running: RunningMoments,
) -> Tensor:
    """Return (rewards - mean) / (std + 1e-6), each moment over its own scope; (N,). ``running``
    already counts these rewards.

    The result is 0 where the std's scope has one member or equal rewards.
    """
    rewards = outcomes.rewards
    result = rewards.double()
    if mean_scope != "none":
        result = result - _moments(outcomes, mean_scope, running)[0]
    if std_scope != "none":
        _, std, count = _moments(outcomes, std_scope, running)
        result = torch.where((count > 1) & (std > STD_EPS), result / (std + STD_EPS), 0)
    return result.to(rewards.dtype)


def _moments(
    outcomes: TrajectoryRewards, scope: NormScope, running: RunningMoments
) -> tuple[Tensor, Tensor, Tensor]:
    rewards = outcomes.rewards
    if scope == "running":
        known = torch.tensor([running.mean, running.std, running.count], dtype=torch.float64)
        return tuple(known[:, None].expand(3, len(rewards)))  # type: ignore[return-value]
    index = torch.zeros_like(outcomes.group_ids)
    if scope == "group":
        index = outcomes.group_ids
    elif scope == "datasource":
        numbers = {name: i for i, name in enumerate(dict.fromkeys(outcomes.sources))}
        index = torch.tensor([numbers[name] for name in outcomes.sources])
    return grouped_moments(rewards, index, outcomes.valid)


# -- rewards of tokens, (B, T) ---------------------------------------------------------------------


def place_scores(
    batch: ExperienceBatch, scores: Tensor, keep_process_rewards: bool = True
) -> Tensor:
    """Place each score on the last sampled token, if any, of its trajectory, (B, T).

    With ``keep_process_rewards``, process rewards stay where they were earned and the last token
    gets the rest, so that a trajectory still sums to its score. ``scores`` are (B,), equal on the
    rows of a trajectory.
    """
    mask = batch.loss_mask
    earned = torch.zeros(mask.shape, dtype=scores.dtype)
    if keep_process_rewards and batch.process_rewards is not None:
        earned = batch.process_rewards.to(scores.dtype).masked_fill(~mask, 0)
    rest = scores - batch.trajectory_sums(earned.sum(-1))
    return torch.where(Trajectories.of(batch).last, earned + rest[:, None], earned)


def token_rewards(
    batch: ExperienceBatch, kl_coef: float, kl_estimator: str, keep_process_rewards: bool = True
) -> Tensor:
    """Return ``place_scores`` minus ``kl_coef`` times the KL of sampled tokens, (B, T)."""
    rewards = place_scores(batch, batch.scores, keep_process_rewards)
    if kl_coef:
        kl = reference_kl(batch, kl_estimator)
        if kl is None:
            raise ValueError(
                f"the KL in the reward by {kl_estimator!r} needs columns that were not filled"
            )
        rewards = rewards - kl_coef * kl.masked_fill(~batch.loss_mask, 0)
    return rewards


def whiten(values: Tensor, mask: Tensor, std_norm: bool = True) -> Tensor:
    """Subtract the mean over the mask and divide by the (biased) std, (B, T); 0 outside. Fewer than
    two masked tokens stay as they are. ``std_norm`` False only subtracts the mean."""
    if int(mask.sum()) < 2:
        return values
    centred = (values - masked_mean(values, mask)).masked_fill(~mask, 0)
    return centred / masked_std(values, mask).clamp(min=MIN_STD) if std_norm else centred


# -- weights of trajectories in the loss, (N,) -----------------------------------------------------


def loss_weights(outcomes: TrajectoryRewards, flags: RewardShapingFlags) -> Tensor | None:
    """Return (N,) factors with mean 1 over valid trajectories; None if no flag sets a weight."""
    if not (flags.difficulty_loss_weight or flags.length_loss_weight):
        return None
    valid, weights = outcomes.valid, torch.ones_like(outcomes.rewards)
    if flags.difficulty_loss_weight:
        weights = 0.5 + 1.5 * difficulty(outcomes, flags.difficulty_key).clamp(0, 1)
    if flags.length_loss_weight:
        lengths = outcomes.lengths[valid]
        low, high = (lengths.min(), lengths.max()) if len(lengths) else (0, 0)
        weights = weights * (1.5 - (outcomes.lengths - low) / max(float(high - low), 1e-8))
    return weights / masked_mean(weights, valid).clamp(min=1e-8)


def difficulty(outcomes: TrajectoryRewards, key: str) -> Tensor:
    """Return difficulties in [0, 1], (N,): a column or, for "auto", 1 - the group's pass rate."""
    if key != "auto":
        if outcomes.difficulty is None:
            raise ValueError("the batch has no difficulty")
        return outcomes.difficulty
    if bool(outcomes.passed[outcomes.valid].isnan().any()):
        raise UserError(
            "--difficulty_key auto: the reward gave no verdict on some samples, so their pass rate"
            " is not known",
            "a reward that returns scores in [0, 1], or a column of the data",
        )
    pass_rate, _, _ = outcomes.group_moments(outcomes.passed.nan_to_num())
    return (1 - pass_rate).to(outcomes.rewards.dtype)
