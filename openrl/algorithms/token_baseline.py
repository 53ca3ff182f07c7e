"""An advantage estimator whose baseline differs from token to token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openrl.algorithms.advantages import from_tokens, returns_to_go
from openrl.algorithms.trajectories import SampledTokens
from openrl.extension_points import advantage_estimators
from openrl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@advantage_estimators.register("optimal_token_baseline", needs=("siblings", "squares"))
@from_tokens
def optimal_token_baseline(tokens: SampledTokens, options: None) -> tuple[Tensor, Tensor]:
    """Return-to-go minus the siblings' mean return at the same token, weighted by how much gradient
    each has gathered up to there; https://richardli.xyz/optimal-token-baseline.

    The weight is the sum of 1 - 2 p + sum of q^2 over the tokens so far, p the probability of the
    sampled token and q all of its distribution: the squared norm of the gradient by the logits.
    Where a trajectory has no sibling left, it gets 0.
    """
    returns, weights = returns_to_go(tokens.rewards), tokens.score_norms.cumsum(-1)
    # trajectories end in the last column; siblings are compared from their first tokens on
    trajectories = tokens.trajectories
    start = trajectories.width - trajectories.lengths[:, None]
    age = torch.arange(trajectories.width) - start
    sampled = age >= 0
    groups = tokens.batch.group_ids[trajectories.first].unique(return_inverse=True)[1]
    cell = (groups[:, None] * trajectories.width + age.clamp(min=0))[sampled]
    sums = torch.zeros(len(groups) * trajectories.width, dtype=torch.float64)
    weighted = sums.index_add(0, cell, (returns * weights)[sampled].double())
    total = sums.index_add(0, cell, weights[sampled].double())
    baselines = torch.zeros_like(returns)
    baselines[sampled] = (weighted / total.clamp(min=1e-8))[cell].to(returns.dtype)
    return returns - baselines, returns
