"""From rewards to advantages, in the order in which everything that touches a reward acts.

Per trajectory:
 1. --format_penalty per unparsable action
 2. --len_reward_coef
 3. --overlong_buffer_len
 4. --stop_properly_penalty_coef on truncated trajectories
 5. the estimator's scores: its own baseline or, in its place, the mean and std that
    --reward_norm_mean and --reward_norm_std ask for, if their scopes differ from the estimator's
 6. --reward_norm_clip
 7. --reward_clip_range, unless the estimator reads the parts of the reward

Per token:
 8. each score on its trajectory's last sampled token (process rewards where they were earned,
    unless step 5 compared or normalised), minus the KL if it is part of the reward
 9. --token_reward_clip
10. --whiten_rewards
11. the estimator's credit: advantages and returns
12. --mask_truncated: truncated trajectories leave the loss here, after they counted in their group
13. --whiten_advantages, --no_advantage_std_norm
14. --advantage_clip
15. --difficulty_loss_weight and --length_loss_weight

``batch.rewards`` stays as the reward source gave it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from openrl.algorithms.advantages import Estimator, as_rewarded
from openrl.algorithms.masked import masked_mean
from openrl.algorithms.shaping import (
    RunningMoments,
    loss_weights,
    normalise,
    shape_rewards,
    token_rewards,
    whiten,
)
from openrl.algorithms.trajectories import Trajectories, TrajectoryRewards
from openrl.config.groups.reward_shaping import NormScope, RewardShapingFlags
from openrl.experience import ExperienceBatch
from openrl.registry import Entry

COLUMN_OF_NEED = {
    "values": "values",
    "greedy_rewards": "greedy_rewards",
    "steps": "state_ids",
    "squares": "squares",
}
"""The column of the batch that each of an estimator's ``needs`` stands for."""


@dataclass(frozen=True)
class CreditSettings:
    """The settings that decide how rewards become advantages; fixed for a run."""

    estimator: Entry[Estimator]
    options: Any
    shaping: RewardShapingFlags
    # scopes of mean and std: as the user gave them, otherwise as the estimator suggests
    norm_scopes: tuple[NormScope, NormScope]
    whiten_advantages: bool
    max_new_tokens: int  # length limit of a response
    whiten_std: bool = True
    kl_estimator: str = "k1"


def compute_advantages(
    batch: ExperienceBatch, plan: CreditSettings, kl_coef: float, running: RunningMoments
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Fill the columns from ``shaped`` to ``loss_weights``; return the batch and metrics.

    Args:
        kl_coef: coefficient of the KL in the reward, 0 if the KL is in the loss or off.
        running: moments of earlier steps' rewards; this batch's rewards are added.

    Raises ValueError for a sampled trajectory without a finite reward, and for a missing column.
    """
    trajectories = Trajectories.of(batch)
    outcomes = TrajectoryRewards.of(batch)
    _check(batch, outcomes, plan.estimator)
    estimator, flags = plan.estimator.component, plan.shaping
    shaped = shape_rewards(outcomes, flags, plan.max_new_tokens)
    outcomes = replace(outcomes, rewards=shaped, role_means=running.role_means)
    scores, metrics = _scores(outcomes, plan, running)
    batch = batch.replace(shaped=trajectories.spread(shaped), scores=trajectories.spread(scores))

    # a compared or normalised score is one number, and process rewards are on another scale
    keep_process_rewards = estimator.scores is as_rewarded and set(plan.norm_scopes) == {"none"}
    rewards = token_rewards(batch, kl_coef, plan.kl_estimator, keep_process_rewards)
    if flags.token_reward_clip is not None:
        limited = rewards.clamp(-flags.token_reward_clip, flags.token_reward_clip)
        metrics |= _share("token_reward_clip_fraction", limited != rewards, batch.loss_mask)
        rewards = limited
    if flags.whiten_rewards:
        rewards = whiten(rewards, batch.loss_mask)
    advantages, returns = estimator.credit(batch.replace(token_rewards=rewards), plan.options)
    batch = batch.replace(token_rewards=rewards, advantages=advantages, returns=returns)

    if flags.mask_truncated:
        metrics["masked_truncated"] = float((outcomes.truncated & outcomes.valid).sum())
        batch = batch.replace(loss_mask=batch.loss_mask & ~batch.truncated[:, None])
    advantages, more = _finished(batch, plan)
    weights = loss_weights(TrajectoryRewards.of(batch), flags)
    if weights is not None:
        batch = batch.replace(loss_weights=trajectories.spread(weights))
    return batch.replace(advantages=advantages), metrics | more


def _scores(
    outcomes: TrajectoryRewards, plan: CreditSettings, running: RunningMoments
) -> tuple[Tensor, dict[str, float]]:
    """Do steps 5 to 7."""
    limits, scopes, estimator = plan.shaping.reward_norm_clip, plan.norm_scopes, plan.estimator
    names, none = ("reward_norm_mean", "reward_norm_std"), ("none", "none")
    own = tuple(estimator.suggests.get(name, "none") for name in names)
    scores, metrics = outcomes.rewards, {}
    if own in (scopes, none):
        scores = estimator.component.scores(outcomes, plan.options)
    if "running" in scopes:
        running.update(scores[outcomes.valid])
        metrics = {"reward_running_mean": running.mean, "reward_running_std": running.std}
    if scopes != own:
        scores = normalise(replace(outcomes, rewards=scores), *scopes, running)
    if limits is not None:
        scores = scores.clamp(*limits)
    if "reward_parts" not in estimator.needs:
        clipped = scores.clamp(*plan.shaping.reward_clip_range)
        metrics |= _share("reward_clip_fraction", clipped != scores, outcomes.valid)
        scores = clipped
    if "group" in scopes or "siblings" in estimator.needs:
        _, _, sizes = outcomes.group_moments(scores)
        metrics["singleton_groups"] = float(((sizes == 1) & outcomes.valid).sum())
    return scores, metrics


def _finished(batch: ExperienceBatch, plan: CreditSettings) -> tuple[Tensor, dict[str, float]]:
    """Do steps 13 and 14."""
    advantages = batch.advantages.masked_fill(~batch.loss_mask, 0)
    mask = batch.loss_mask
    limit = plan.shaping.advantage_clip
    metrics = {}
    if plan.whiten_advantages:
        metrics["whitening_skipped"] = float(int(mask.sum()) < 2)
        advantages = whiten(advantages, mask, plan.whiten_std)
    if limit is not None:
        metrics |= _share("advantage_clip_fraction", advantages.abs() > limit, mask)
        advantages = advantages.clamp(-limit, limit)
    return advantages, metrics


def _check(
    batch: ExperienceBatch, outcomes: TrajectoryRewards, estimator: Entry[Estimator]
) -> None:
    if bad := (outcomes.valid & ~outcomes.rewards.isfinite()).nonzero().flatten().tolist():
        raise ValueError(f"trajectories {bad[:8]} have no finite reward ({len(bad)} in all)")
    needed = [column for need, column in COLUMN_OF_NEED.items() if need in estimator.needs]
    if missing := [column for column in needed if getattr(batch, column) is None]:
        problem = f"{', '.join(missing)}, which the batch lacks"
        raise ValueError(f"advantage estimator {estimator.name} needs {problem}")


def _share(name: str, hit: Tensor, mask: Tensor) -> dict[str, float]:
    """Return the share of the masked positions that were hit; empty if there are none."""
    return {name: float(masked_mean(hit.float(), mask))} if mask.any() else {}
