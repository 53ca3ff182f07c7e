"""KL to the reference policy: estimators per token, and its coefficient. torch only."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from openrl.experience import ExperienceBatch
from openrl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

RESULT_LIMIT = 10.0  # no token's KL counts for more

# Per token, d = logp - ref_logp (http://joschu.net/blog/kl-approx.html), and the d where it reaches
# RESULT_LIMIT.
_ESTIMATORS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "k1": (lambda d: d, -RESULT_LIMIT, RESULT_LIMIT),
    "abs": (lambda d: d.abs(), -RESULT_LIMIT, RESULT_LIMIT),
    "k2": (lambda d: d.square() / 2, -math.sqrt(2 * RESULT_LIMIT), math.sqrt(2 * RESULT_LIMIT)),
    "k3": (lambda d: torch.expm1(-d) + d, -2.610868638149876, 10.999983298020256),
}
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "low_var": "k3"}


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """KL estimate of each token, shape of ``logprobs``, within +-10.

    k1 d, k2 d^2/2, k3 exp(-d) - 1 + d, abs |d| with d = logprobs - ref_logprobs; k1+ and k3+ have
    the value of k1 and k3 and the gradient of k2, which is the unbiased one of a KL loss
    (https://arxiv.org/abs/2510.01555). Where the limit is reached the gradient keeps the slope it
    has there: a plain clamp would drop the penalty exactly on the tokens that drifted furthest."""
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
    """What ``full_kl`` needs of the reference: ids (..., K) of its ``top_k`` likeliest tokens, and
    their log-probs with that of all other tokens together at the end, (..., K + 1).

    ``ref_logits`` (..., V), already divided by the temperature. From ``top_k`` V on there are no
    others: (..., V) each."""
    ids = ref_logits.topk(min(top_k, ref_logits.shape[-1]), dim=-1).indices
    return ids, support_logprobs(ref_logits, ids)


def support_logprobs(logits: Tensor, ids: Tensor | None) -> Tensor:
    """Log-probs of the tokens ``ids`` (..., K), then of all others together: (..., K + 1). Without
    others, or with ``ids`` None for every token in order: (..., V). Exact however little is left
    outside."""
    log_partition = logits.logsumexp(-1, keepdim=True)
    if ids is None:
        return logits - log_partition
    inside = logits.gather(-1, ids)
    if ids.shape[-1] == logits.shape[-1]:
        return inside - log_partition
    others = logits.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([inside, others], -1) - log_partition


def full_kl(logits: Tensor, ids: Tensor | None, ref_logprobs: Tensor) -> Tensor:
    """KL(policy || reference) of the next-token distributions, (...), exact with the whole
    vocabulary as support.

    With K < V the other tokens count as one bucket, which bounds the KL from below (data-processing
    inequality). Unlike the estimators of single tokens it is not limited.

    Args:
        logits: (..., V) of the policy, divided by the temperature.
        ids, ref_logprobs: of ``reference_support``; or None and (..., V) for the whole vocabulary
            in order.
    """
    logprobs = support_logprobs(logits, ids)
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)


def full_kl_gradient(logits: Tensor, ids: Tensor | None, ref_logprobs: Tensor) -> Tensor:
    """(..., V): d KL / d z_j = p_j (a_j - KL), where a_j is the log-ratio of the token j or of the
    bucket it is in."""
    logprobs = support_logprobs(logits, ids)
    log_ratios = logprobs - ref_logprobs
    kl = (logprobs.exp() * log_ratios).sum(-1, keepdim=True)
    if ids is not None:
        inside = log_ratios[..., : ids.shape[-1]]
        log_ratios = log_ratios[..., -1:].expand(logits.shape).scatter(-1, ids, inside)
    return logits.softmax(-1) * (log_ratios - kl)


def reference_kl(batch: ExperienceBatch, estimator: str) -> Tensor | None:
    """(B, T) KL of the policy before its update to the reference; None where nobody computed what
    it takes."""
    if estimator == "full":
        return batch.full_kl
    if batch.old_logprobs is None or batch.ref_logprobs is None:
        return None
    return kl_estimate(batch.old_logprobs, batch.ref_logprobs, estimator)


class KLCoefficient:
    """A coefficient that stays or, with a ``target``, is steered so that the measured KL nears it;
    https://arxiv.org/abs/1909.08593 section 2.2."""

    def __init__(self, coef: float, target: float | None = None, horizon: int = 1) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, n_samples: int) -> None:
        """``kl`` in nats per token over the step's ``n_samples`` samples."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * n_samples / self.horizon

    def state(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state(self, state: dict[str, float]) -> None:
        """Without a target the flag rules; nothing is restored."""
        if self.target is not None:
            self.coef = state["coef"]
