"""Log-probs and entropy of given tokens, from hidden states; the only shift by one in the package.

The hidden state at index t-1 predicts the token at index t. ``shift_left`` moves what belongs to a
token beside the state that predicts it; ``shift_right`` moves results back to the token. In a
column, index t describes ``token_ids[:, t]``; index 0 has no prediction and is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openrl.algorithms.kl import Divergence, Weights, divergence, divergence_gradient
from openrl.models.kept import KeptIds, cut_
from openrl.models.logits import (
    COMPARISONS,
    LogitTransform,
    Other,
    Output,
    Outputs,
    Projection,
    placed,
)
from openrl.models.reference import Distributions, FrozenHead, distributions, reference_columns

Comparison = tuple[Divergence | Weights, Distributions]
"""Another model's distributions, and how the policy's are compared with them."""

HEAD_BLOCK = 16_384
"""How many rows of the output head get their gradient at a time: no chunk copies all of it."""


def shift_left(values: Tensor) -> Tensor:
    """Shift values per token, (R, S, ...), so that index t holds the value of the token at t + 1.
    The last index has no next token and gets the value of index 0, which is never predicted."""
    return values.roll(-1, 1)


def shift_right(values: Tensor) -> Tensor:
    """Invert ``shift_left``: move what the state at t says about the next token to t + 1."""
    return values.roll(1, 1)


ROW_BLOCK = 128
"""How many tokens of a chunk are scored at a time, without a second matrix of its logits' size."""


class LogprobHead(nn.Module):
    """Replaces a model's output head and owns its parameters, under the same names.

    The owner of the parameters matters: ZeRO-3 gathers a module's own parameters around its forward
    and backward pass, so all chunks run within one gather, however many tokens each rank has.
    """

    def __init__(self, head: nn.Linear, transform: LogitTransform, chunk_size: int) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias
        self.transform, self.chunk_size = transform, chunk_size
        # of the models that distributions are compared with over the whole vocabulary
        self.frozen_heads: dict[Other, FrozenHead] = {}
        # as a reference or a teacher: how many likeliest tokens to return; 0 returns hidden states
        self.top_k: dict[Other, int] = {}
        self.rollout_weights: Weights | None = None  # of the engine's tokens in ``rollout_kl``
        self.vocabulary: int | None = None  # as a teacher: tokens from here on are not the policy's

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        predicts: Tensor,
        outputs: Sequence[Output] = (),
        compared: Mapping[Other, Sequence[Tensor]] | None = None,
        kept: KeptIds | None = None,
    ) -> Outputs:
        """Return log-probs, (R, S) fp32, and whatever else is wanted, (R, S, ...), each beside the
        state that predicts the token.

        All are 0 where ``predicts`` is False: before padding, before the first token of a sequence,
        and before tokens that nobody scores.

        Args:
            hidden: (R, S, H).
            targets: (R, S) int64, each token's next token.
            predicts: (R, S) bool, whether the next token is predicted.
            compared: columns of reference and teacher for the N predicted tokens, (N, ...).
            kept: the sets that these N tokens were drawn from, where sampling was cut.
        """
        states, compared = hidden[predicts], compared or {}
        wanted = [name for name in outputs if name in COMPARISONS]
        comparisons: list[Comparison] = []
        for other, kind in map(COMPARISONS.__getitem__, wanted):
            target = distributions(compared[other], self.frozen_heads.get(other), kept)
            weights = self.rollout_weights if other == "rollout" else None
            comparisons.append((weights or kind, target))
        head = Projection(self.weight, self.bias, self.transform)
        logprobs, entropies, divergences = token_logprobs(
            states,
            head,
            targets[predicts],
            self.chunk_size,
            "entropy" in outputs,
            comparisons,
            kept,
        )
        found = {"entropy": entropies} | dict(zip(wanted, divergences, strict=True))
        if "squares" in outputs:
            found["squares"] = squared_probabilities(states, head, self.chunk_size, kept)
        for other, top_k in self.top_k.items():
            if other in outputs:
                bias = None if self.bias is None else self.bias[: self.vocabulary]
                shared = Projection(self.weight[: self.vocabulary], bias, self.transform)
                found |= reference_columns(states, shared, self.chunk_size, top_k, kept, other)
        return placed(logprobs, predicts), {
            n: placed(c, predicts) for n, c in found.items() if c is not None
        }


def token_logprobs(
    states: Tensor,
    head: Projection,
    targets: Tensor,
    chunk_size: int,
    entropy: bool = False,
    comparisons: Sequence[Comparison] = (),
    kept: KeptIds | None = None,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Compute log p of each target given the hidden state that predicts it.

    Args:
        states: (N, H) hidden states.
        head: from these states to logits.
        targets: (N,) int64.
        chunk_size: how many tokens' logits exist at a time; the backward pass computes them again.
            0 means all at once.
        entropy: also return the entropy of each distribution, in nats.
        comparisons: also return the divergence of each distribution to these.
        kept: the sets that the targets were drawn from; None means the whole vocabulary.

    Returns:
        (N,) log-probs, entropies or None, a list of divergences; fp32, or fp64 for fp64 states.
    """
    if chunk_size and len(targets) > chunk_size:
        rest = (targets, chunk_size, entropy, comparisons, kept)
        logprobs, entropies, *found = _Chunked.apply(states, *head, *rest)
        return logprobs, entropies if entropy else None, found
    logits = cut_(head.logits(states), kept)
    found = [divergence(kind, logits, *target(slice(None))) for kind, target in comparisons]
    return *_score(logits, targets, entropy)[:2], found


@torch.no_grad()
def squared_probabilities(
    states: Tensor, head: Projection, chunk_size: int, kept: KeptIds | None = None
) -> Tensor:
    """Return the sum of the squared probabilities of each distribution, (N,); the arguments are
    those of ``token_logprobs``."""
    found = states.new_zeros(len(states), dtype=torch.promote_types(states.dtype, torch.float32))
    for rows in _chunks(len(states), chunk_size or max(len(states), 1)):
        logits = cut_(head.logits(states[rows]), kept, rows)
        found[rows] = ((2 * logits).logsumexp(-1) - 2 * logits.logsumexp(-1)).exp()
    return found


def _score(logits: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Score (n, V) logits; return log-probs, entropies or None, and log partitions, (n,) each."""
    log_partition = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - log_partition
    if not entropy:
        return logprobs, None, log_partition
    probabilities = (logits - log_partition[:, None]).exp_()
    weighted = probabilities * logits if torch.is_grad_enabled() else probabilities.mul_(logits)
    return logprobs, log_partition - weighted.sum(-1), log_partition


class _Chunked(torch.autograd.Function):
    """``_score`` and ``divergence`` with the logits of one chunk at a time, in both directions."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, states, weight, bias, transform, targets, chunk_size, entropy, comparisons, kept
    ):
        parts: list[Any] = []
        compared: list[list[Tensor]] = [[] for _ in comparisons]
        for rows in _chunks(len(targets), chunk_size):
            logits = transform(F.linear(states[rows], weight, bias))
            for own, inside in _blocks(rows, len(logits)):
                cut_(logits[inside], kept, own)
                parts.append(_score(logits[inside], targets[own], entropy))
                for found, (kind, target) in zip(compared, comparisons, strict=True):
                    found.append(divergence(kind, logits[inside], *target(own)))
            del logits  # otherwise they would coexist with the next chunk's
        logprobs = torch.cat([p[0] for p in parts])
        entropies = torch.cat([p[1] for p in parts]) if entropy else torch.zeros_like(logprobs)
        log_partition = torch.cat([p[2] for p in parts])
        ctx.save_for_backward(states, weight, bias, targets, log_partition, entropies)
        ctx.transform, ctx.chunk_size, ctx.comparisons = transform, chunk_size, comparisons
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*([] if entropy else [entropies]))
        return logprobs, entropies, *map(torch.cat, compared)

    @staticmethod
    def backward(  # type: ignore[no-untyped-def]
        ctx, grad_logprobs, grad_entropies, *grad_compared
    ):
        states, weight, bias, targets, log_partition, entropies = ctx.saved_tensors
        # chunks are summed in at least fp32
        exact = torch.promote_types(states.dtype, torch.float32)
        grad_states = torch.empty_like(states)
        grad_weight = torch.zeros_like(weight, dtype=exact) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=exact)
        for rows in _chunks(len(targets), ctx.chunk_size):
            logits = ctx.transform(F.linear(states[rows], weight, bias))
            # the gradient overwrites the logits
            for own, inside in _blocks(rows, len(logits)):
                block = cut_(logits[inside], ctx.kept, own)
                up = [None if g is None else g[own, None] for g in (grad_logprobs, grad_entropies)]
                gradient = _score_gradient(
                    block, targets[own], log_partition[own, None], entropies[own, None], *up
                )
                for (kind, target), grad in zip(ctx.comparisons, grad_compared, strict=True):
                    if grad is not None:
                        slopes = divergence_gradient(kind, block, *target(own))
                        gradient += slopes * grad[own, None]
                block.copy_(ctx.transform.backward(gradient, block))
            of_raw = logits.to(states.dtype)
            del logits, block, gradient
            torch.mm(of_raw, weight, out=grad_states[rows])
            if grad_weight is not None:
                for part in _chunks(len(weight), HEAD_BLOCK):
                    grad_weight[part] += of_raw[:, part].T @ states[rows]
            if grad_bias is not None:
                grad_bias += of_raw.sum(0)
            del of_raw
        return (
            grad_states,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            *(None,) * 6,
        )


def _score_gradient(
    logits: Tensor,
    targets: Tensor,
    log_partition: Tensor,
    entropies: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropies: Tensor | None,
) -> Tensor:
    """Return d loss / d logits, (n, V), given the gradients of log-probs and entropies, (n, 1)
    each. It allocates one matrix, and a second one for the entropy.

    d log p(target) / dz_j = [j is target] - p_j, and dH / dz_j = -p_j (log p_j + H).
    """
    gradient = (logits - log_partition).exp_().neg_()
    if grad_entropies is not None:
        slope = (logits - log_partition).add_(entropies).mul_(grad_entropies)
        gradient.mul_(slope if grad_logprobs is None else slope.add_(grad_logprobs))
    else:
        gradient.mul_(0 if grad_logprobs is None else grad_logprobs)
    if grad_logprobs is None:
        return gradient
    return gradient.scatter_add_(1, targets[:, None], grad_logprobs)


def _blocks(rows: slice, count: int) -> list[tuple[slice, slice]]:
    """Split a chunk of ``count`` tokens; return the parts' places among all and in the chunk."""
    first = rows.start
    parts = _chunks(count, ROW_BLOCK)
    return [(slice(first + p.start, first + min(p.stop, count)), p) for p in parts]


def _chunks(n: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, n, size)]
