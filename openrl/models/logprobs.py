"""Log-probs and entropy of given tokens, from hidden states: the only shift by one in the package.

The hidden state at index t-1 predicts the token at index t. Everything here returns columns in which index t
describes ``token_ids[:, t]``; index 0 has no prediction and is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LogitTransform:
    """What an architecture does to logits after its output head, then division by the sampling temperature.

    logits = softcap * tanh(scale * head(h) / softcap) / temperature; ``softcap`` None: no cap (Gemma has one).
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def __call__(self, raw: Tensor) -> Tensor:
        """Raw head outputs in any float type -> logits in at least fp32."""
        logits = raw.to(torch.promote_types(raw.dtype, torch.float32))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature if self.temperature != 1.0 else logits

    def backward(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """d loss / d logits -> d loss / d raw."""
        factor = self.scale / self.temperature
        if self.softcap is None:
            return gradient * factor
        return gradient * factor * (1 - (logits * (self.temperature / self.softcap)).square())


class LogprobHead(nn.Module):
    """Takes the place of a model's output head and owns its parameters, under the same names.

    Being the module that owns them matters: ZeRO-3 gathers a module's own parameters around its forward and
    backward, so all chunks run within one gather, however many tokens each rank has.
    """

    def __init__(self, head: nn.Linear, transform: LogitTransform, chunk_size: int) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias
        self.transform, self.chunk_size = transform, chunk_size

    def forward(
        self, hidden: Tensor, token_ids: Tensor, predicted: Tensor, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """hidden (R, S, H), token_ids (R, S), predicted (R, S) bool -> log-probs and entropy, (R, S) fp32.

        Both are 0 where ``predicted`` is False: on padding, and on the first token of each sequence of a row, index 0
        at least. The entropy is None unless asked for.
        """
        states = hidden[:, :-1][predicted[:, 1:]]
        logprobs, entropies = token_logprobs(
            states, self.weight, self.bias, token_ids[predicted], self.transform, self.chunk_size, entropy
        )
        blank = torch.zeros(token_ids.shape, dtype=logprobs.dtype, device=logprobs.device)
        return (
            blank.masked_scatter(predicted, logprobs),
            blank.masked_scatter(predicted, entropies) if entropies is not None else None,
        )


def token_logprobs(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    chunk_size: int,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log p of each target given the hidden state that predicts it.

    Args:
        states: (N, H) hidden states.
        weight, bias: (V, H) and (V,) or None, the output head.
        targets: (N,) int64.
        chunk_size: tokens whose logits exist at a time; in the backward pass they are computed again. 0: all at once.
        entropy: also give the entropy of each distribution, in nats.

    Returns:
        (N,) log-probs and (N,) entropies or None; fp32, or fp64 for fp64 states.
    """
    if chunk_size and len(targets) > chunk_size:
        logprobs, entropies = _Chunked.apply(states, weight, bias, targets, transform, chunk_size, entropy)
        return logprobs, entropies if entropy else None
    return _score(transform(F.linear(states, weight, bias)), targets, entropy)[:2]


def _score(logits: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """(n, V) logits -> log-probs (n,), entropies (n,) or None, log partition (n,)."""
    log_partition = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - log_partition
    if not entropy:
        return logprobs, None, log_partition
    mean_logit = ((logits - log_partition[:, None]).exp() * logits).sum(-1)
    return logprobs, log_partition - mean_logit, log_partition


class _Chunked(torch.autograd.Function):
    """``_score`` over chunks of tokens: logits of one chunk at a time in both directions."""

    @staticmethod
    def forward(ctx, states, weight, bias, targets, transform, chunk_size, entropy):  # type: ignore[no-untyped-def]
        parts = [
            _score(transform(F.linear(states[rows], weight, bias)), targets[rows], entropy)
            for rows in _chunks(len(targets), chunk_size)
        ]
        logprobs = torch.cat([p[0] for p in parts])
        entropies = torch.cat([p[1] for p in parts]) if entropy else torch.zeros_like(logprobs)
        ctx.save_for_backward(states, weight, bias, targets, torch.cat([p[2] for p in parts]), entropies)
        ctx.transform, ctx.chunk_size = transform, chunk_size
        ctx.set_materialize_grads(False)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropies):  # type: ignore[no-untyped-def]
        states, weight, bias, targets, log_partition, entropies = ctx.saved_tensors
        exact = torch.promote_types(states.dtype, torch.float32)  # chunks add up in at least fp32
        grad_states = torch.empty_like(states)
        grad_weight = torch.zeros(weight.shape, dtype=exact, device=weight.device) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros(bias.shape, dtype=exact, device=bias.device) if bias is not None else None
        for rows in _chunks(len(targets), ctx.chunk_size):
            logits = ctx.transform(F.linear(states[rows], weight, bias))
            all_logprobs = logits - log_partition[rows, None]
            minus_p = -all_logprobs.exp()
            gradient = torch.zeros_like(logits)
            if grad_logprobs is not None:  # d log p(target) / dz_j = [j is target] - p_j
                gradient = minus_p * grad_logprobs[rows, None]
                gradient.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
            if grad_entropies is not None:  # dH / dz_j = -p_j (log p_j + H)
                gradient += minus_p * (all_logprobs + entropies[rows, None]) * grad_entropies[rows, None]
            of_raw = ctx.transform.backward(gradient, logits).to(states.dtype)
            grad_states[rows] = of_raw @ weight
            if grad_weight is not None:
                grad_weight += of_raw.T @ states[rows]
            if grad_bias is not None:
                grad_bias += of_raw.sum(0)
        return (
            grad_states,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            *(None,) * 4,
        )


def _chunks(n: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, n, size)]
