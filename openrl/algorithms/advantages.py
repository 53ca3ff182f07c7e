"""Advantage estimators: shaped rewards, and values, to per-token advantages and returns. torch only.

An estimator works in one of two places of ``openrl.algorithms.credit.assign_credit``, which runs it:
``from_scores`` ones turn the samples' rewards into scores (a baseline among siblings, say), which are then placed on
tokens and summed from the end; ``from_tokens`` ones read the finished token rewards. Names are resolved by
``openrl.extension_points.advantage_estimators``; ``suggests`` fills flags that were not given.

Rows without a sampled token (a failed sample) are no members of their group. Environment tokens inside a response
neither earn, nor discount, nor bootstrap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrl.extension_points import advantage_estimators
from openrl.flags.schema import flag
from openrl.types import ExperienceBatch

ScoreFn = Callable[[ExperienceBatch, Any], Tensor]
CreditFn = Callable[[ExperienceBatch, Any], tuple[Tensor, Tensor]]


def returns_to_go(token_rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted sum of this and all later rewards on sampled tokens, (B, T); 0 outside the mask."""
    earned = token_rewards.masked_fill(~mask, 0)
    if gamma == 1:
        return earned.flip(-1).cumsum(-1).flip(-1).masked_fill(~mask, 0)
    result = torch.zeros_like(earned)
    running = torch.zeros_like(earned[:, 0])
    for t in _sampled_columns(mask):
        running = torch.where(mask[:, t], earned[:, t] + gamma * running, running)
        result[:, t] = running
    return result.masked_fill(~mask, 0)


def _sampled_columns(mask: Tensor) -> list[int]:
    """Columns with a sampled token, last first."""
    return mask.any(0).nonzero().flatten().flip(0).tolist()


def sum_from_the_end(batch: ExperienceBatch, options: Any) -> tuple[Tensor, Tensor]:
    """Undiscounted returns to go as advantages: with no rewards on the way, the score on every token."""
    returns = returns_to_go(batch.token_rewards, batch.loss_mask)
    return returns, returns


@dataclass(frozen=True)
class Estimator:
    """How rewards become advantages, in two steps around the shaping of token rewards."""

    scores: ScoreFn = lambda batch, options: batch.scores  # (B,) from shaped rewards in batch.scores
    credit: CreditFn = sum_from_the_end  # advantages, returns (B, T) from batch.token_rewards


def from_scores(fn: ScoreFn) -> Estimator:
    """Decorator: the function gives scores (B,)."""
    return Estimator(scores=fn)


def from_tokens(fn: CreditFn) -> Estimator:
    """Decorator: the function gives advantages and returns, both (B, T)."""
    return Estimator(credit=fn)


@dataclass(frozen=True)
class DiscountOptions:
    gamma: float = flag(1.0, "Discount per sampled token; environment tokens do not count.", bounds="[0, 1]")


@dataclass(frozen=True)
class GAEOptions(DiscountOptions):
    lambd: float = flag(1.0, "Lambda of GAE: towards 1 less bias and more variance.", bounds="[0, 1]")


@advantage_estimators.register("gae", options=GAEOptions, needs=("values",), suggests={"whiten_advantages": True})
@from_tokens
def gae(batch: ExperienceBatch, options: GAEOptions) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, https://arxiv.org/abs/1506.02438 eq. 16, over sampled tokens alone."""
    mask, rewards, values = batch.loss_mask, batch.token_rewards, batch.values
    advantages = torch.zeros_like(values)
    running, next_value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in _sampled_columns(mask):
        delta = rewards[:, t] + options.gamma * next_value - values[:, t]
        running = torch.where(mask[:, t], delta + options.gamma * options.lambd * running, running)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = running
    advantages = advantages.masked_fill(~mask, 0)
    return advantages, (advantages + values).masked_fill(~mask, 0)


# GRPO, https://arxiv.org/abs/2402.03300 section 4.1: the estimator is a choice of scopes for --reward_norm_*.
for _name in ("group_norm", "grpo"):
    advantage_estimators.register(
        _name, needs=("siblings",), suggests={"reward_norm_mean": "group", "reward_norm_std": "group"}
    )(Estimator())
