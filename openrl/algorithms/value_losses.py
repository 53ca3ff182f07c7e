"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from openrl.experience import TokenLosses


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float
) -> TokenLosses:
    """Return half the squared error to the returns, per token; all tensors are (b, T).

    With ``clip`` > 0 the loss is the larger of the plain error and the error of values clipped to
    ``old_values`` +- clip, as in OpenAI's PPO baselines: moving further than ``clip`` in one step
    gains nothing. 0 turns clipping off.
    """
    plain = (values - returns).square()
    if clip <= 0:
        return TokenLosses(plain / 2)
    clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return TokenLosses(
        torch.maximum(plain, clipped) / 2, {"clip_fraction": (clipped > plain).to(values.dtype)}
    )
