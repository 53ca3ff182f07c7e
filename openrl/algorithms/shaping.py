"""Rewards of samples and tokens, before and after the baseline. torch only; credit.py lists the order of operations."""

from __future__ import annotations

import torch
from torch import Tensor

from openrl.algorithms.kl import kl_estimate
from openrl.algorithms.masked import grouped_moments, masked_mean, masked_std
from openrl.config.shaping import NormScope, RewardShapingFlags
from openrl.types import ExperienceBatch

STD_EPS = 1e-6  # added to a std before dividing; at or below it rewards count as equal


def shape_rewards(batch: ExperienceBatch, flags: RewardShapingFlags) -> Tensor:
    """(B,) rewards after penalties and the clip range."""
    return batch.rewards.clamp(*flags.reward_clip_range)


def members(batch: ExperienceBatch) -> Tensor:
    """(B,) bool: rows that count in statistics of rewards, those with a sampled token."""
    return batch.loss_mask.any(-1)


def normalise(scores: Tensor, batch: ExperienceBatch, mean_scope: NormScope, std_scope: NormScope) -> Tensor:
    """(scores - mean) / (std + 1e-6), each over its own scope; (B,).

    0 where the std's scope has one member or equal rewards. A mean scope with one member gives 0 by itself.
    """
    result = scores.double()
    if mean_scope != "none":
        result = result - _moments(scores, batch, mean_scope)[0]
    if std_scope != "none":
        _, std, count = _moments(scores, batch, std_scope)
        result = torch.where((count > 1) & (std > STD_EPS), result / (std + STD_EPS), 0)
    return result.to(scores.dtype)


def _moments(scores: Tensor, batch: ExperienceBatch, scope: NormScope) -> tuple[Tensor, Tensor, Tensor]:
    if scope == "group":
        index = batch.group_ids
    elif scope == "datasource":
        names = sorted(set(batch.sources))
        index = torch.tensor([names.index(source) for source in batch.sources])
    else:
        index = torch.zeros_like(batch.group_ids)
    return grouped_moments(scores, index, members(batch))


def place_scores(batch: ExperienceBatch, scores: Tensor) -> Tensor:
    """(B, T): each score on the row's last sampled token; rows without one get none."""
    mask = batch.loss_mask
    last = mask.shape[1] - 1 - mask.flip(-1).int().argmax(-1, keepdim=True)
    placed = torch.zeros(mask.shape, dtype=scores.dtype).scatter(1, last, scores[:, None])
    return placed * mask


def token_rewards(batch: ExperienceBatch, kl_coef: float, kl_estimator: str) -> Tensor:
    """(B, T): ``batch.scores`` on the last sampled token, minus ``kl_coef`` times the KL to the reference on each."""
    rewards = place_scores(batch, batch.scores)
    if kl_coef:
        kl = kl_estimate(batch.old_logprobs, batch.ref_logprobs, kl_estimator)
        rewards = rewards - kl_coef * kl.masked_fill(~batch.loss_mask, 0)
    return rewards


def whiten(values: Tensor, mask: Tensor, std_norm: bool = True) -> Tensor:
    """(B, T): minus the mean, divided by the (biased) std over the mask; 0 outside. Untouched with fewer than two
    masked tokens. ``std_norm`` False subtracts the mean only."""
    if int(mask.sum()) < 2:
        return values
    centred = (values - masked_mean(values, mask)) * mask
    return centred / masked_std(values, mask).clamp(min=1e-4) if std_norm else centred
