"""From rewards to advantages: the order in which everything that touches a reward acts. torch only.

Per sample:
 1. --format_penalty per unparsable action
 2. --len_reward_coef
 3. --overlong_buffer_len
 4. --stop_properly_penalty_coef on truncated samples
 5. --reward_clip_range
 6. the estimator's scores: its own baseline, or mean and std by --reward_norm_mean and
   --reward_norm_std
 7. --reward_norm_clip

Per token:
 8. each score on its row's last sampled token (process rewards where they were earned), minus the
    KL where the KL is in the reward
 9. --token_reward_clip
10. --whiten_rewards
11. the estimator's credit: advantages and returns
12. --mask_truncated: such rows leave the loss here, so they did count in their group
13. --whiten_advantages, --no_advantage_std_norm
14. --advantage_clip
15. --difficulty_loss_weight and --length_loss_weight

``batch.rewards`` stays as the reward source gave it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrl.algorithms.advantages import Estimator
from openrl.algorithms.masked import grouped_moments, masked_mean
from openrl.algorithms.shaping import (
    RunningMoments,
    loss_weights,
    normalise,
    shape_rewards,
    token_rewards,
    whiten,
)
from openrl.config.shaping import NormScope, RewardShapingFlags
from openrl.registry import Entry
from openrl.types import ExperienceBatch

COLUMN_OF_NEED = {
    "values": "values",
    "greedy_rewards": "greedy_rewards",
    "steps": "state_ids",
}
"""Which column of the batch an estimator's ``needs`` stands for."""


@dataclass(frozen=True)
class CreditPlan:
    """What decides how rewards become advantages; fixed for a run."""

    estimator: Entry[Estimator]
    options: Any
    shaping: RewardShapingFlags
    norm_scopes: tuple[
        NormScope, NormScope
    ]  # of mean and std: as given, else as the estimator suggests
    whiten_advantages: bool
    max_new_tokens: int  # length limit of a response
    whiten_std: bool = True
    kl_estimator: str = "k1"


def assign_credit(
    batch: ExperienceBatch, plan: CreditPlan, kl_coef: float, running: RunningMoments
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Fill ``scores``, ``token_rewards``, ``advantages``, ``returns`` and ``loss_weights``; also
    metrics.

    Args:
        kl_coef: coefficient of the KL in the reward, 0 if it is in the loss or nowhere.
        running: moments of earlier steps' rewards; takes in this batch's.

    Raises ValueError if a row with sampled tokens has no finite reward, or a column that the
    estimator needs is missing."""
    _check(batch, plan.estimator)
    estimator, flags = plan.estimator.component, plan.shaping
    shaped = shape_rewards(batch, flags, plan.max_new_tokens)
    batch = batch.replace(scores=shaped.clamp(*flags.reward_clip_range))
    metrics = {"reward_clip_fraction": _share(batch.scores != shaped, batch.members)}

    batch, more = _normalised(
        batch.replace(scores=estimator.scores(batch, plan.options)), plan, running
    )
    metrics |= more

    rewards = token_rewards(batch, kl_coef, plan.kl_estimator)
    if flags.token_reward_clip is not None:
        clipped = rewards.clamp(-flags.token_reward_clip, flags.token_reward_clip)
        metrics["token_reward_clip_fraction"] = _share(clipped != rewards, batch.loss_mask)
        rewards = clipped
    if flags.whiten_rewards:
        rewards = whiten(rewards, batch.loss_mask)
    advantages, returns = estimator.credit(batch.replace(token_rewards=rewards), plan.options)
    batch = batch.replace(token_rewards=rewards, advantages=advantages, returns=returns)

    if flags.mask_truncated:
        metrics["masked_truncated"] = float((batch.truncated & batch.members).sum())
        batch = batch.replace(loss_mask=batch.loss_mask & ~batch.truncated[:, None])
    advantages, more = _finished(batch, plan)
    return (
        batch.replace(advantages=advantages, loss_weights=loss_weights(batch, flags)),
        metrics | more,
    )


def _normalised(
    batch: ExperienceBatch, plan: CreditPlan, running: RunningMoments
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Steps 6 and 7."""
    limits, scopes = plan.shaping.reward_norm_clip, plan.norm_scopes
    metrics = {}
    if "running" in scopes:
        running.update(batch.scores[batch.members])
        metrics = {"reward_running_mean": running.mean, "reward_running_std": running.std}
    scores = normalise(batch.scores, batch, *scopes, running)
    if limits is not None:
        scores = scores.clamp(*limits)
    if "group" in scopes or "siblings" in plan.estimator.needs:
        _, _, sizes = grouped_moments(scores, batch.group_ids, batch.members)
        metrics["singleton_groups"] = float(((sizes == 1) & batch.members).sum())
    return batch.replace(scores=scores), metrics


def _finished(batch: ExperienceBatch, plan: CreditPlan) -> tuple[Tensor, dict[str, float]]:
    """Steps 13 and 14."""
    advantages, mask, limit = (
        batch.advantages.masked_fill(~batch.loss_mask, 0),
        batch.loss_mask,
        plan.shaping.advantage_clip,
    )
    metrics = {}
    if plan.whiten_advantages:
        metrics["whitening_skipped"] = float(int(mask.sum()) < 2)
        advantages = whiten(advantages, mask, plan.whiten_std)
    if limit is not None:
        metrics["advantage_clip_fraction"] = _share(advantages.abs() > limit, mask)
        advantages = advantages.clamp(-limit, limit)
    return advantages, metrics


def _check(batch: ExperienceBatch, estimator: Entry[Estimator]) -> None:
    if bad := (batch.members & ~batch.rewards.isfinite()).nonzero().flatten().tolist():
        raise ValueError(f"rows {bad[:8]} have no finite reward ({len(bad)} in all)")
    missing = [
        c for need, c in COLUMN_OF_NEED.items() if need in estimator.needs and not _has(batch, c)
    ]
    if missing:
        raise ValueError(
            f"advantage estimator {estimator.name} needs {', '.join(missing)}, which the batch"
            " lacks"
        )


def _has(batch: ExperienceBatch, column: str) -> bool:
    value = getattr(batch, column)
    return value is not None and (isinstance(value, torch.Tensor) or bool(value))


def _share(hit: Tensor, mask: Tensor) -> float:
    """Share of the masked positions that were hit."""
    return float(masked_mean(hit.float(), mask))
