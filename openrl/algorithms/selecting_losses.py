"""Policy losses that treat some tokens apart, https://arxiv.org/abs/2505.22617.

Log-probs of the old policy select the tokens before training, once over the whole rollout batch: a
choice inside each micro-batch would depend on its size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openrl.algorithms.masked import masked_mean
from openrl.algorithms.policy_losses import (
    PolicyLoss,
    PPOOptions,
    clamped_log_ratio,
    clipped_surrogate,
    log_ratio,
)
from openrl.experience import ExperienceBatch, LossInputs, TokenLosses
from openrl.extension_points import policy_losses
from openrl.flags.schema import Options, flag
from openrl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SelectingLoss:
    """A loss together with the function that selects the tokens it treats apart."""

    # returns (B, T) bool, which becomes ``batch.selected``
    select: Callable[[ExperienceBatch, Any, torch.Generator], Tensor]
    loss: PolicyLoss

    def __call__(self, inputs: LossInputs, options: Any) -> TokenLosses:
        return self.loss(inputs, options)


def select_tokens(
    batch: ExperienceBatch, loss: PolicyLoss, options: Any, generator: torch.Generator
) -> ExperienceBatch:
    """Fill ``selected`` if ``loss`` selects tokens, by ``old_logprobs`` and ``advantages``."""
    if isinstance(loss, SelectingLoss):
        return batch.replace(selected=loss.select(batch, options, generator))
    return batch


def covariance(batch: ExperienceBatch) -> Tensor:
    """Return (A - mean A)(log p - mean log p) of each token, (B, T); -inf outside the mask."""
    mask = batch.loss_mask
    advantages = batch.advantages - masked_mean(batch.advantages, mask)
    logprobs = batch.old_logprobs - masked_mean(batch.old_logprobs, mask)
    return (advantages * logprobs).masked_fill(~mask, -torch.inf)


def _share(ratio: float, mask: Tensor) -> int:
    """Return how many masked tokens make up that share, at least one."""
    return max(1, int(ratio * int(mask.sum())))


@dataclass(frozen=True)
class ClipCovOptions(PPOOptions):
    clip_cov_ratio: float = flag(
        2e-4, "Share of tokens whose gradient is dropped.", bounds="(0, 1]"
    )
    clip_cov_range: tuple[float, float] = flag(
        (1.0, 5.0),
        "Tokens are chosen among those with covariance of advantage and log-prob in this range.",
        bounds="increasing",
    )


def _random_in_range(
    batch: ExperienceBatch, options: ClipCovOptions, generator: torch.Generator
) -> Tensor:
    low, high = options.clip_cov_range
    cov = covariance(batch)
    inside = ((cov > low) & (cov < high)).flatten().nonzero().flatten()
    count = _share(options.clip_cov_ratio, batch.loss_mask)
    chosen = inside[torch.randperm(len(inside), generator=generator)[:count]]
    return torch.zeros(cov.numel(), dtype=torch.bool).index_fill(0, chosen, True).view_as(cov)


def _clip_cov(inputs: LossInputs, options: ClipCovOptions) -> TokenLosses:
    """PPO without the gradient of a few random tokens of high covariance, which would cost entropy;
    https://arxiv.org/abs/2505.22617."""
    losses = clipped_surrogate(
        clamped_log_ratio(inputs), inputs.advantages, options.low_high, options.dual
    )
    return TokenLosses(losses.per_token.masked_fill(inputs.selected, 0), losses.metrics)


policy_losses.register("clip_cov", options=ClipCovOptions, needs=("advantages", "old_logprobs"))(
    SelectingLoss(_random_in_range, _clip_cov)
)


@dataclass(frozen=True)
class KLCovOptions(Options):
    kl_cov_ratio: float = flag(
        2e-4, "Share of tokens with highest covariance that get a KL penalty.", bounds="(0, 1]"
    )
    kl_cov_coef: float = flag(0.1, "Weight of that penalty.", bounds=">= 0")


def _highest(batch: ExperienceBatch, options: KLCovOptions, generator: torch.Generator) -> Tensor:
    cov = covariance(batch).flatten()
    count = min(_share(options.kl_cov_ratio, batch.loss_mask), int(batch.loss_mask.sum()))
    chosen = torch.zeros(cov.numel(), dtype=torch.bool).index_fill(0, cov.topk(count).indices, True)
    return chosen.view_as(batch.loss_mask)


def _kl_cov(inputs: LossInputs, options: KLCovOptions) -> TokenLosses:
    """Unclipped policy gradient with a KL penalty on the tokens of highest covariance;
    https://arxiv.org/abs/2505.22617."""
    plain = -clamped_log_ratio(inputs).exp() * inputs.advantages
    penalty = options.kl_cov_coef * log_ratio(inputs).abs()
    return TokenLosses(plain + penalty.masked_fill(~inputs.selected, 0))


policy_losses.register("kl_cov", options=KLCovOptions, needs=("advantages", "old_logprobs"))(
    SelectingLoss(_highest, _kl_cov)
)
