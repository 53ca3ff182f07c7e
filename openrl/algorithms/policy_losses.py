"""Policy losses: log-probs and advantages of one micro-batch to a loss per token. torch only.

Each is ``loss(inputs, options) -> TokenLosses``; the caller masks, sums and divides (``masked.step_loss``). Names are
resolved by ``openrl.extension_points.policy_losses``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from openrl.extension_points import policy_losses
from openrl.flags.schema import flag
from openrl.types import LossInputs, TokenLosses

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: absurd and finite


def log_ratio(inputs: LossInputs) -> Tensor:
    """log(new / old probability) of each token, (b, T), within +-20, 0 outside the mask."""
    difference = (inputs.logprobs - inputs.old_logprobs).masked_fill(~inputs.loss_mask, 0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass(frozen=True)
class ClipOptions:
    eps_clip: float = flag(0.2, "Ratio is clipped to [1 - eps, 1 + eps].", bounds="> 0")
    eps_clip_low_high: tuple[float, float] | None = flag(
        None, "Ratio is clipped to [1 - L, 1 + H]; wins over --eps_clip. None: eps_clip twice.", bounds=">= 0"
    )

    @property
    def low_high(self) -> tuple[float, float]:
        return self.eps_clip_low_high or (self.eps_clip, self.eps_clip)


@dataclass(frozen=True)
class PPOOptions(ClipOptions):
    dual_clip: float | Literal["auto"] | None = flag(
        None, "For A < 0 the loss is at most -c*A. auto: 1 + 2*eps_clip. None: off.", bounds="> 1"
    )

    @property
    def dual(self) -> float | None:
        return 1 + 2 * self.eps_clip if self.dual_clip == "auto" else self.dual_clip


@policy_losses.register("ppo", options=PPOOptions)
def ppo(inputs: LossInputs, options: PPOOptions) -> TokenLosses:
    """Clipped surrogate, https://arxiv.org/abs/1707.06347 eq. 7; unequal clips are DAPO's clip-higher
    (https://arxiv.org/abs/2503.14476); dual clip is https://arxiv.org/abs/1912.09729 eq. 8."""
    return clipped_surrogate(log_ratio(inputs), inputs.advantages, options.low_high, options.dual)


def clipped_surrogate(
    log_ratios: Tensor, advantages: Tensor, low_high: tuple[float, float], dual_clip: float | None = None
) -> TokenLosses:
    """PPO's loss for given log-ratios, per token; all (b, T)."""
    low, high = low_high
    ratio = log_ratios.exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - low, 1 + high) * advantages
    losses = torch.maximum(plain, clipped)
    metrics = {"clip_fraction": (clipped > plain).to(losses.dtype).detach()}
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        over = (advantages < 0) & (losses > ceiling)
        losses = torch.where(over, ceiling, losses)
        metrics["dual_clip_fraction"] = over.to(losses.dtype)
    return TokenLosses(losses, metrics)
