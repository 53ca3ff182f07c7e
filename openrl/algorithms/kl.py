"""Distances to another model, a reference or a teacher: estimators of single tokens, divergences of
whole distributions; and the KL coefficient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from openrl.experience import ExperienceBatch
from openrl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]
"""Divergences of the policy's next-token distributions to another model's."""

Weights = Callable[["Tensor"], "Tensor"]
"""Log-ratios of probabilities, policy's to another's, -> weights without a gradient. As a
divergence, it stands for forward_kl with each of its terms so weighted."""

RESULT_LIMIT = 10.0  # upper limit of one token's KL

# Each estimator is a formula of d = logp - ref_logp (http://joschu.net/blog/kl-approx.html),
# followed by the smallest and the largest d that keep it within RESULT_LIMIT.
_ESTIMATORS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "k1": (lambda d: d, -RESULT_LIMIT, RESULT_LIMIT),
    "abs": (lambda d: d.abs(), -RESULT_LIMIT, RESULT_LIMIT),
    "k2": (lambda d: d.square() / 2, -math.sqrt(2 * RESULT_LIMIT), math.sqrt(2 * RESULT_LIMIT)),
    "k3": (lambda d: torch.expm1(-d) + d, -2.610868638149876, 10.999983298020256),
}
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Return the KL estimate of each token, in the shape of ``logprobs``, within +-10.

    With d = logprobs - ref_logprobs: k1 is d, k2 is d^2/2, k3 is exp(-d) - 1 + d, abs is |d|. k1+
    and k3+ have the value of k1 and k3 and the gradient of k2, which is the unbiased gradient of a
    KL loss (https://arxiv.org/abs/2510.01555). Beyond the limit the gradient keeps the slope it has
    at the limit: a plain clamp would drop the penalty exactly on the tokens that drifted furthest.
    """
    d = logprobs - ref_logprobs
    if estimator in ("k1+", "k3+"):
        value, slope = _limited(d.detach(), estimator[:2]), _limited(d, "k2")
        return value + (slope - slope.detach())
    return _limited(d, ALIASES.get(estimator, estimator))


def _limited(d: Tensor, estimator: str) -> Tensor:
    formula, low, high = _ESTIMATORS[estimator]
    inside = d.detach().clamp(low, high) + (d - d.detach())  # the clamped value, with gradient 1
    return formula(inside)


def reference_support(ref_logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return what ``divergence`` needs of the other model: the ids of its ``top_k`` likeliest
    tokens, (..., K), and their log-probs followed by the log-prob of all other tokens together,
    (..., K + 1).

    ``ref_logits`` (..., V) are already divided by the temperature. With ``top_k`` >= V there are no
    other tokens, and both results are (..., V).
    """
    ids = ref_logits.topk(min(top_k, ref_logits.shape[-1]), dim=-1).indices
    return ids, support_logprobs(ref_logits, ids)


def support_logprobs(logits: Tensor, ids: Tensor | None) -> Tensor:
    """Return the log-probs of the tokens ``ids`` (..., K), followed by the log-prob of all others
    together: (..., K + 1). If ``ids`` covers the vocabulary, or is None (every token in order),
    there are no others and the result is (..., V). The result is exact however little probability
    is left outside."""
    log_partition = logits.logsumexp(-1, keepdim=True)
    if ids is None:
        return logits - log_partition
    inside = logits.gather(-1, ids)
    if ids.shape[-1] == logits.shape[-1]:
        return inside - log_partition
    others = logits.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([inside, others], -1) - log_partition


def divergence(
    kind: Divergence | Weights, logits: Tensor, ids: Tensor | None, other: Tensor
) -> Tensor:
    """Return the divergence of the policy's next-token distributions P and another model's Q,
    (...); exact with all tokens: KL(P || Q) for reverse_kl, KL(Q || P) for forward_kl, and for jsd
    (KL(P || M) + KL(Q || M)) / 2 with M = (P + Q) / 2.

    With K < V the other tokens count as one bucket, so the result is a lower bound (data-processing
    inequality). Unlike the estimators of single tokens it is not limited.

    Args:
        logits: (..., V) of the policy, divided by the temperature.
        ids, other: of the other model, from ``reference_support``; or None and (..., V) for all in
            order.
    """
    own = support_logprobs(logits, ids)
    if kind == "reverse_kl":
        return (own.exp() * (own - other)).sum(-1)
    if kind == "forward_kl":
        return (other.exp() * (other - own)).sum(-1)
    if callable(kind):
        return (other.exp() * kind(own - other) * (other - own)).sum(-1)
    mean = _mean(own, other)
    return (own.exp() * (own - mean) + other.exp() * (other - mean)).sum(-1) / 2


def divergence_gradient(
    kind: Divergence | Weights, logits: Tensor, ids: Tensor | None, other: Tensor
) -> Tensor:
    """Return d D / d z_j, (..., V), with the arguments of ``divergence``.

    D depends on the probabilities P_i of the tokens of the support and of the bucket. With the
    weights w_i = P_i dD / dP_i it is p_j / P_i * w_i - p_j * sum(w), where i is token j itself or
    the bucket that holds it."""
    own = support_logprobs(logits, ids)
    if kind == "reverse_kl":
        weights = own.exp() * (own - other)
    elif kind == "forward_kl":
        weights = -other.exp()
    elif callable(kind):
        weights = -other.exp() * kind(own - other)
    else:
        weights = own.exp() * (own - _mean(own, other)) / 2
    logprobs = logits.log_softmax(-1)
    shares = weights
    if ids is not None:
        inside, of_bucket = weights[..., : ids.shape[-1]], weights[..., -1:]
        shares = (logprobs - own[..., -1:]).exp() * of_bucket
        shares = shares.scatter(-1, ids, inside)
    return shares - logprobs.exp() * weights.sum(-1, keepdim=True)


def _mean(own: Tensor, other: Tensor) -> Tensor:
    """Return the log-probs of the mean of two distributions."""
    return torch.logaddexp(own, other) - math.log(2)


def reference_kl(batch: ExperienceBatch, estimator: str) -> Tensor | None:
    """Return the KL of the policy before its update, (B, T); None without the columns for it."""
    if estimator == "full":
        return batch.full_kl
    if batch.old_logprobs is None or batch.ref_logprobs is None:
        return None
    return kl_estimate(batch.old_logprobs, batch.ref_logprobs, estimator)


class KLCoefficient:
    """A KL coefficient that is fixed or, with a ``target``, is steered so that the measured KL
    approaches the target; https://arxiv.org/abs/1909.08593 section 2.2."""

    def __init__(self, coef: float, target: float | None = None, horizon: int = 1) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, n_samples: int) -> None:
        """Steer by the ``kl`` of one step, in nats per token over its ``n_samples`` samples."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * n_samples / self.horizon

    def state(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state(self, state: dict[str, float]) -> None:
        """Restore the coefficient if it has a target; otherwise the flag decides."""
        if self.target is not None:
            self.coef = state["coef"]
