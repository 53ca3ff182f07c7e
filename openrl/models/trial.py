"""A trial of a model: what it makes of ordinary tokens, and how far apart two results may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import PretrainedConfig

Run = Callable[[Tensor, Tensor], Tensor]
"""A model: (b, T) token ids and attention mask -> its output."""


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

    @torch.no_grad()
    def probe(self, run: Run) -> Tensor:
        """Return results, (2, ...), for the tokens and for them with their first half reversed."""
        rows = torch.stack([self.tokens, torch.cat([self.tokens[:6].flip(0), self.tokens[6:]])])
        mask = torch.ones(1, 12, dtype=torch.bool)
        return torch.stack([run(row[None], mask)[0] for row in rows]).float().cpu()

    def differ(self, found: Tensor, expected: Tensor) -> str | None:
        """Describe how the results of ``probe`` for a model in parts differ from those for the
        whole; None if they do not. The difference is compared with what the first half changes in
        the second."""
        # the results of six tokens or, from a reward model, of the row
        halves = [x.reshape(2, -1)[:, -6:] for x in (found, expected, expected.flip(0))]
        gap = self.discrepancy(*halves)
        return None if gap is None else f"parts do not add up to the whole ({gap})"

    def discrepancy(self, found: Tensor, expected: Tensor, other: Tensor) -> str | None:
        """Return how far ``found`` is from ``expected``; None if they are close enough.

        Close means, on average, within a tenth of the distance to ``other``, the result of another
        input, or within one rounding error of the result's size.
        """
        gap, reach = (float((x - expected).abs().mean()) for x in (found, other))
        rounding = torch.finfo(self.dtype).eps * float(expected.abs().mean())
        return None if gap <= max(0.1 * reach, rounding) else f"{gap:.2g} of {reach:.2g}"
