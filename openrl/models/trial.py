"""A trial of a model before a run: ordinary tokens, and how far apart two results may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import PretrainedConfig


@dataclass(frozen=True)
class Trial:
    """Twelve tokens, and the dtype that the model computes in."""

    tokens: Tensor  # (12,) int64
    dtype: torch.dtype

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype) -> Self:
        """Take tokens from the middle of the vocabulary. Control tokens are at its ends; they never
        follow one another in text, and at log-probs of -20 to -30 nats rounding errors look like
        mistakes."""
        size = config.get_text_config().vocab_size
        return cls(torch.linspace(size // 4, 3 * size // 4, 12).long(), dtype)

    def discrepancy(self, found: Tensor, expected: Tensor, other: Tensor) -> str | None:
        """Return how far ``found`` is from ``expected``, which should be equal; None if they are
        close enough.

        Close means, on average, within a tenth of the distance to ``other``, the result of another
        input, or within one rounding error of the result's size.
        """
        gap, reach = (float((x - expected).abs().mean()) for x in (found, other))
        rounding = torch.finfo(self.dtype).eps * float(expected.abs().mean())
        return None if gap <= max(0.1 * reach, rounding) else f"{gap:.2g} of {reach:.2g}"
