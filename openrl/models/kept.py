"""The sets of tokens that a truncated distribution was sampled from, beside the states that predict
the tokens.

Where sampling was cut by top_p, top_k or min_p, a token was drawn from softmax(z) over its kept
set. Every pass gives the other tokens the logit NEVER, so that log-probs, entropies, divergences
and their gradients are those of the distribution that was sampled. The sets are constants: almost
everywhere they do not change with the weights, so the gradient is exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrl.models.logits import NEVER
from openrl.token_origins import KeptSets


@dataclass(frozen=True)
class KeptIds:
    """The kept sets of N tokens, or of a micro-batch of (b, T) tokens."""

    spans: Tensor  # (N, 2) or (b, T, 2) int64: first place in ``ids``, and size; 0: all tokens
    ids: Tensor  # (M,) int32
    widest: int  # size of the largest set

    @classmethod
    def of(cls, rows: Sequence[KeptSets | None], width: int, device: torch.device) -> KeptIds:
        """Return the sets of rows that are padded or cut to ``width``. Unknown sets count as all
        tokens: these tokens are not trained."""
        spans = torch.zeros(len(rows), width, 2, dtype=torch.int64)
        found, begin, widest = [torch.zeros(1, dtype=torch.int32)], 1, 0
        for row, kept in enumerate(rows):
            if kept is None or not kept.ids:
                continue
            sizes = torch.frombuffer(kept.sizes, dtype=torch.int32).clamp(min=0).long()
            # a token without a set points at the 0 before all sets, since none may follow it
            starts = (begin + sizes.cumsum(0) - sizes).masked_fill(sizes == 0, 0)
            length = min(width, len(sizes))
            spans[row, :length] = torch.stack([starts, sizes], -1)[:length]
            found.append(torch.frombuffer(kept.ids, dtype=torch.int32))
            begin, widest = begin + len(kept.ids), max(widest, int(sizes.max()))
        return cls(spans.to(device), torch.cat(found).to(device), widest)

    def at(self, arranged: Callable[[Tensor], Tensor]) -> KeptIds:
        """Return the sets of the tokens that ``arranged`` takes, (b, T, 2) -> (N, 2)."""
        return KeptIds(arranged(self.spans), self.ids, self.widest)

    def outside(self, rows: slice, vocabulary: int) -> Tensor:
        """Return (n, V) bool, True for tokens that could not be drawn."""
        starts, sizes = self.spans[rows].unbind(-1)
        column = torch.arange(max(self.widest, 1), device=starts.device)
        # a smaller set repeats its first token
        places = starts[:, None] + column.where(column < sizes[:, None], 0)
        outside = (sizes > 0)[:, None].repeat(1, vocabulary)
        return outside.scatter_(1, self.ids[places].long(), False)


def cut_(logits: Tensor, kept: KeptIds | None, rows: slice = slice(None)) -> Tensor:
    """Give the logits (n, V) of the tokens ``rows`` the value NEVER outside their kept sets, in
    place."""
    if kept is None:
        return logits
    return logits.masked_fill_(kept.outside(rows, logits.shape[-1]), NEVER)
