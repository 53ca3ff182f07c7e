"""From rewards to advantages: the order in which everything that touches a reward acts. torch only.

 1. clamp to --reward_clip_range
 2. the estimator's scores: its own baseline, or mean and std by --reward_norm_mean and --reward_norm_std
 3. each score on its row's last sampled token, minus KL where the KL is in the reward
 4. the estimator's credit: advantages and returns
 5. whitening of advantages (--whiten_advantages)

``batch.rewards`` stays as the reward source gave it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openrl.algorithms.advantages import Estimator
from openrl.algorithms.shaping import members, normalise, shape_rewards, token_rewards, whiten
from openrl.config.shaping import RewardShapingFlags
from openrl.registry import Entry
from openrl.types import ExperienceBatch


@dataclass(frozen=True)
class CreditPlan:
    """What decides how rewards become advantages; fixed for a run."""

    estimator: Entry[Estimator]
    options: Any
    shaping: RewardShapingFlags
    whiten_advantages: bool
    whiten_std: bool = True
    kl_estimator: str = "k1"


def assign_credit(batch: ExperienceBatch, plan: CreditPlan, kl_coef: float) -> ExperienceBatch:
    """Fill ``scores``, ``token_rewards``, ``advantages`` and ``returns``.

    ``kl_coef`` is the coefficient of the KL in the reward, 0 if it is in the loss or nowhere. Raises ValueError if a
    row with sampled tokens has no finite reward.
    """
    if bad := (members(batch) & ~batch.rewards.isfinite()).nonzero().flatten().tolist():
        raise ValueError(f"rows {bad[:8]} have no finite reward ({len(bad)} in all)")
    estimator, suggests = plan.estimator.component, plan.estimator.suggests
    batch = batch.replace(scores=shape_rewards(batch, plan.shaping))
    scores = estimator.scores(batch, plan.options)
    mean_scope = plan.shaping.reward_norm_mean or suggests.get("reward_norm_mean", "none")
    std_scope = plan.shaping.reward_norm_std or suggests.get("reward_norm_std", "none")
    batch = batch.replace(scores=normalise(scores, batch, mean_scope, std_scope))
    batch = batch.replace(token_rewards=token_rewards(batch, kl_coef, plan.kl_estimator))
    advantages, returns = estimator.credit(batch, plan.options)
    if plan.whiten_advantages:
        advantages = whiten(advantages, batch.loss_mask, plan.whiten_std)
    return batch.replace(advantages=advantages, returns=returns)
