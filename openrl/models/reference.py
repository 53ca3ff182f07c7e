"""The next-token distributions of a reference or a teacher, in a batch and compared with chunk by
chunk.

With the K likeliest tokens as support, a token costs K ids and K + 1 log-probs, the last for all
other tokens together. For the whole vocabulary, the model's hidden states travel instead, H
numbers per token, and the policy keeps a frozen copy of the model's output head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openrl.algorithms.kl import reference_support
from openrl.models.kept import KeptIds, cut_
from openrl.models.logits import LogitTransform, Other, Projection

PREFIX: dict[Other, str] = {"reference": "ref", "teacher": "teacher", "rollout": "rollout"}
"""How the names of a model's columns in a batch begin."""

Distributions = Callable[[slice], tuple[Tensor | None, Tensor]]
"""For N tokens: a slice of them -> the arguments ``ids`` and ``other`` of ``divergence``."""


class FrozenHead:
    """The output head of another model: V x H numbers on each rank of the policy."""

    def __init__(self, head: nn.Linear, transform: LogitTransform) -> None:
        self.weight, self.transform = head.weight.detach().clone(), transform
        self.bias = None if head.bias is None else head.bias.detach().clone()

    def logprobs(self, states: Tensor, kept: KeptIds | None, rows: slice) -> Tensor:
        """Return the log-probs (n, V) of hidden states (N, H)[rows], over the kept sets."""
        self.weight = self.weight.to(states.device)
        self.bias = None if self.bias is None else self.bias.to(states.device)
        logits = self.transform(F.linear(states[rows], self.weight, self.bias))
        return cut_(logits, kept, rows).log_softmax(-1)


def distributions(
    columns: Sequence[Tensor], head: FrozenHead | None, kept: KeptIds | None = None
) -> Distributions:
    """Return the distributions in another model's columns of N tokens, which ``reference_columns``
    made. With a head, the columns are the hidden states (N, H) that it predicts from; otherwise
    they are ids (N, K) and log-probs (N, K + 1)."""
    if head is not None:
        (states,) = columns
        return lambda rows: (None, head.logprobs(states, kept, rows))
    ids, logprobs = columns
    return lambda rows: (ids[rows].long(), logprobs[rows])


@torch.no_grad()
def reference_columns(
    states: Tensor,
    head: Projection,
    chunk_size: int,
    top_k: int,
    kept: KeptIds | None = None,
    other: Other = "reference",
) -> dict[str, Tensor]:
    """Return the columns of ``other`` in a batch, by their names: ``ref_ids`` and ``ref_support``
    of (N, H) states or, with ``top_k`` 0, ``ref_hidden``; of a teacher, ``teacher_ids`` and so
    on."""
    prefix = PREFIX[other]
    if top_k == 0:
        return {f"{prefix}_hidden": states}
    parts, size = [], chunk_size or max(len(states), 1)
    for rows in (slice(start, start + size) for start in range(0, max(len(states), 1), size)):
        logits = cut_(head.logits(states[rows]), kept, rows)
        parts.append(reference_support(logits, top_k))
    ids, logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    return {f"{prefix}_ids": ids.int(), f"{prefix}_support": logprobs}
