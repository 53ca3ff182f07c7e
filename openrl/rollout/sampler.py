"""Samples one token from one row of logits, with the sampling parameters of one request."""

from __future__ import annotations

import torch
from torch import Tensor

from openrl.types import Sampling


def sample_token(
    logits: Tensor, seen: Tensor, sampling: Sampling, generator: torch.Generator
) -> tuple[int, float]:
    """Return the next token and its log-prob. ``logits`` is (V,); ``seen`` (n,) holds the tokens of
    prompt and completion so far.

    The steps follow vLLM's order: repetition penalty, temperature, min_p, top_k, top_p. The
    log-prob is that of the distribution sampled from. Temperature 0 takes the likeliest token,
    with its log-prob at temperature 1."""
    logits = apply_repetition_penalty(logits.float(), seen, sampling.repetition_penalty)
    if sampling.temperature == 0.0:
        token = int(logits.argmax())
        return token, float(logits.log_softmax(-1)[token])
    logits = filter_logits(logits / sampling.temperature, sampling)
    logprobs = logits.log_softmax(-1)
    token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
    return token, float(logprobs[token])


def apply_repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the positive and multiply the negative logits of ``seen`` tokens (Keskar et al. 2019,
    CTRL)."""
    if penalty == 1.0:
        return logits
    chosen = logits[seen]
    return logits.scatter(0, seen, torch.where(chosen > 0, chosen / penalty, chosen * penalty))


def filter_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Set the logits that min_p, top_k and top_p exclude to -inf. At least one token stays."""
    if sampling.min_p > 0.0:
        logits = logits.masked_fill(
            logits < logits.max() + torch.tensor(sampling.min_p).log(), -torch.inf
        )
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = logits.sort(descending=True)
        # probability mass of all likelier tokens
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.scatter(0, order, ordered.masked_fill(before >= sampling.top_p, -torch.inf))
    return logits
