"""KL to the reference policy: estimators per token, and the coefficient's controllers. torch only."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

RESULT_LIMIT = 10.0  # no token's KL counts for more

# Per token, d = logp - ref_logp (http://joschu.net/blog/kl-approx.html), and the d where it reaches RESULT_LIMIT.
_ESTIMATORS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "k1": (lambda d: d, -RESULT_LIMIT, RESULT_LIMIT),
    "abs": (torch.abs, -RESULT_LIMIT, RESULT_LIMIT),
    "k2": (lambda d: d.square() / 2, -math.sqrt(2 * RESULT_LIMIT), math.sqrt(2 * RESULT_LIMIT)),
    "k3": (lambda d: torch.expm1(-d) + d, -2.610868638149876, 10.999983298020256),
}
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "low_var": "k3"}


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """KL estimate of each token, shape of ``logprobs``, within +-10.

    k1 d, k2 d^2/2, k3 exp(-d) - 1 + d, abs |d| with d = logprobs - ref_logprobs; k1+ and k3+ have the value of k1 and
    k3 and the gradient of k2, which is the unbiased one of a KL loss (https://arxiv.org/abs/2510.01555).
    Where the limit is reached the gradient keeps the slope it has there: a plain clamp would drop the penalty
    exactly on the tokens that drifted furthest.
    """
    d = logprobs - ref_logprobs
    if estimator in ("k1+", "k3+"):
        value, slope = _limited(d.detach(), estimator[:2]), _limited(d, "k2")
        return value + (slope - slope.detach())
    return _limited(d, ALIASES.get(estimator, estimator))


def _limited(d: Tensor, estimator: str) -> Tensor:
    formula, low, high = _ESTIMATORS[estimator]
    inside = d.detach().clamp(low, high) + (d - d.detach())  # clamped value, gradient 1
    return formula(inside)


def reference_support(ref_logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """What ``full_kl`` needs of the reference: ids and log-probs of its ``top_k`` likeliest tokens, both (..., K).

    ``ref_logits`` (..., V), already divided by the temperature; ``top_k`` 0 or above V takes the whole vocabulary.
    """
    logprobs = ref_logits.log_softmax(-1)
    vocabulary = logprobs.shape[-1]
    top = logprobs.topk(top_k if 0 < top_k < vocabulary else vocabulary, dim=-1)
    return top.indices, top.values


def full_kl(logits: Tensor, ids: Tensor, ref_logprobs: Tensor) -> Tensor:
    """KL(policy || reference) of the next-token distributions, (...), exact with the whole vocabulary as support.

    With K < V the other tokens count as one bucket, which bounds the KL from below (data-processing inequality).
    ``logits`` (..., V) of the policy, divided by the temperature; ``ids`` and ``ref_logprobs`` of ``reference_support``.
    """
    logprobs = logits.log_softmax(-1).gather(-1, ids)
    kl = (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)
    if ids.shape[-1] == logits.shape[-1]:
        return kl
    tiny = torch.finfo(logits.dtype).tiny
    rest, ref_rest = ((1 - lp.exp().sum(-1)).clamp(min=tiny) for lp in (logprobs, ref_logprobs))
    return kl + rest * (rest.log() - ref_rest.log())


class FixedKL:
    """A coefficient that stays."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, n_samples: int) -> None:
        """Does nothing."""

    def state(self) -> dict[str, float]:
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        """The flag rules; nothing is restored."""


class AdaptiveKL:
    """Steers the coefficient so that the measured KL nears ``target``; https://arxiv.org/abs/1909.08593 section 2.2."""

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, n_samples: int) -> None:
        """``kl`` in nats per token over the step's ``n_samples`` samples."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * n_samples / self.horizon

    def state(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]
