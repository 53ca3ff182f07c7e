"""What an architecture does to its logits, and what a forward pass returns besides its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from openrl.algorithms.kl import Divergence

Output = Literal[
    "entropy",
    "squares",
    "full_kl",
    "reverse_kl",
    "forward_kl",
    "jsd",
    "rollout_kl",
    "reference",
    "teacher",
    "balance",
]
"""Names of what a caller may ask for:

entropy    (b, T) of the distribution that each token was drawn from, in nats
squares    (b, T) sum of the squared probabilities of that distribution, without a gradient
full_kl    (b, T) KL of that distribution to the reference's, whose columns are in the batch
reverse_kl, forward_kl, jsd
           (b, T) divergences of that distribution and the teacher's, whose columns are in the batch
rollout_kl (b, T) KL of the engine's distribution to that distribution, from the batch's columns;
           its terms may be weighted
reference  from a reference: the columns that ``full_kl`` needs, by their names in a batch
teacher    from a teacher: the columns that the divergences need, by their names in a batch
balance    scalar, how unevenly a mixture of experts spreads the tokens of the micro-batch
"""

Other = Literal["reference", "teacher", "rollout"]
"""Whose distributions the policy's are compared with: another model's, or the engine's."""

COMPARISONS: dict[Output, tuple[Other, Divergence]] = {
    "full_kl": ("reference", "reverse_kl"),
    "reverse_kl": ("teacher", "reverse_kl"),
    "forward_kl": ("teacher", "forward_kl"),
    "jsd": ("teacher", "jsd"),
    "rollout_kl": ("rollout", "forward_kl"),
}
"""The outputs that compare distributions: with whose, and how."""

Outputs = tuple[Tensor, dict[str, Tensor]]
"""A model's output, and the further outputs asked for by their names."""

NEVER = -1e4
"""The logit of a token that is never sampled: it makes the probability 0 in every float type."""


def placed(values: Tensor, mask: Tensor) -> Tensor:
    """Put (N, ...) values at the True places of a mask (b, T); return (b, T, ...), 0 elsewhere."""
    blank = torch.zeros(mask.shape + values.shape[1:], dtype=values.dtype, device=values.device)
    return blank.masked_scatter(like(mask, blank), values)


def like(mask: Tensor, values: Tensor) -> Tensor:
    """View a mask (b, T) with as many dimensions as ``values`` (b, T, ...)."""
    return mask.view(*mask.shape, *(1 for _ in values.shape[2:]))


@dataclass(frozen=True)
class LogitTransform:
    """What an architecture does to logits after its output head, followed by division by the
    sampling temperature.

    logits = softcap * tanh(scale * head(h) / softcap) / temperature; with ``softcap`` None the tanh
    is left out (Gemma has a cap).
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    banned: tuple[int, ...] = ()  # ids of tokens that are never sampled

    def __call__(self, raw: Tensor) -> Tensor:
        """Turn raw head outputs of any float type into logits in at least fp32."""
        logits = raw.to(torch.promote_types(raw.dtype, torch.float32))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        logits = logits / self.temperature if self.temperature != 1.0 else logits
        if self.banned:  # not -inf, because 0 * -inf is NaN
            index = torch.tensor(self.banned, device=logits.device)
            logits = logits.index_fill(-1, index, NEVER)
        return logits

    def backward(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Turn d loss / d logits into d loss / d raw."""
        factor = self.scale / self.temperature
        if self.softcap is None:
            return gradient if factor == 1.0 else gradient * factor
        return gradient * factor * (1 - (logits * (self.temperature / self.softcap)).square())


class Projection(NamedTuple):
    """From hidden states to logits: an output head, and what follows it."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    transform: LogitTransform

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits (n, V) of hidden states (n, H)."""
        return self.transform(F.linear(states, self.weight, self.bias))
