"""What a model is tried on before a run: ordinary tokens, and how far apart two results may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import PretrainedConfig


@dataclass(frozen=True)
class Trial:
    """Twelve tokens, and the type that the model computes in."""

    tokens: Tensor  # (12,) int64
    dtype: torch.dtype

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype) -> Self:
        """Tokens from the middle of the vocabulary. Control tokens stand at its ends: no text has
        them in a row, and at log-probs of -20 to -30 nats roundings look like mistakes."""
        size = config.get_text_config().vocab_size
        return cls(torch.linspace(size // 4, 3 * size // 4, 12).long(), dtype)

    def apart(self, found: Tensor, expected: Tensor, other: Tensor) -> str | None:
        """How far ``found`` is from ``expected``, where both should be one; None if near enough.

        Near is, in the mean, a tenth of what another input makes of it, ``other``, or one rounding
        of its size."""
        gap, reach = (float((x - expected).abs().mean()) for x in (found, other))
        rounding = torch.finfo(self.dtype).eps * float(expected.abs().mean())
        return None if gap <= max(0.1 * reach, rounding) else f"{gap:.2g} of {reach:.2g}"
