"""Losses on given answers: likelihood, preferences, rewards of pairs. They need only torch.

P is the number of pairs, b of rows. The log-prob of an answer is the sum over its tokens unless a
name says mean; gradients flow through the policy's log-probs. Losses are per pair or row, so the
caller divides by the counts of the whole optimizer step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from openrl.algorithms.masked import masked_mean, masked_sum
from openrl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def answer_logprobs(logprobs: Tensor, mask: Tensor, mean: bool = False) -> Tensor:
    """Reduce the log-probs of tokens, (b, T), to those of answers, (b,): their sum, or their mean
    over tokens."""
    return masked_mean(logprobs, mask, -1) if mean else masked_sum(logprobs, mask, -1)


def good_sample_nll(logprobs: Tensor, rewards: Tensor, threshold: float) -> Tensor:
    """Return -log p on samples whose unshaped reward (b,) is above ``threshold``, 0 on the others;
    (b, T)."""
    return -logprobs * (rewards > threshold)[:, None]


def dpo_loss(chosen: Tensor, rejected: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Return the DPO loss, (P,), https://arxiv.org/abs/2305.18290 eq. 7. ``label_smoothing`` is the
    assumed share of flipped labels (cDPO).

    ``chosen`` and ``rejected`` (P,) are log-ratios to the reference or, without a reference,
    log-probs.
    """
    logits = beta * (chosen - rejected)
    return -(1 - label_smoothing) * torch.nn.functional.logsigmoid(
        logits
    ) - label_smoothing * torch.nn.functional.logsigmoid(-logits)


def ipo_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return the IPO loss, (P,), https://arxiv.org/abs/2310.12036 eq. 17, on sums over tokens as
    the paper derives it. The arguments are DPO's."""
    return (chosen - rejected - 1 / (2 * beta)).square()


def kto_loss(
    log_ratios: Tensor,
    desirable: Tensor,
    kl: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """Return the KTO loss, (b,), https://arxiv.org/abs/2402.01306 eq. 8.

    Args:
        log_ratios: (b,) log-ratios of the answers to the reference.
        desirable: (b,) bool.
        kl: the scalar from ``kto_reference_point``, the same for every row of the step.
    """
    kl = kl.detach()
    gain = 1 - torch.sigmoid(beta * (log_ratios - kl))
    loss = 1 - torch.sigmoid(beta * (kl - log_ratios))
    return torch.where(desirable, desirable_weight * gain, undesirable_weight * loss)


def kto_reference_point(mismatched_log_ratios: Tensor) -> Tensor:
    """Return KTO's KL, a scalar: the mean log-ratio of answers paired with other rows' prompts, at
    least 0."""
    return mismatched_log_ratios.detach().mean().clamp(min=0)


def orpo_loss(chosen_mean: Tensor, rejected_mean: Tensor, beta: float) -> Tensor:
    """Return the ORPO loss, (P,), https://arxiv.org/abs/2403.07691 eq. 6 and 7: the mean negative
    log-likelihood of the chosen answer plus ``beta`` times the odds-ratio term. The arguments are
    means over tokens."""
    odds = _log_odds(chosen_mean) - _log_odds(rejected_mean)
    return -chosen_mean - beta * torch.nn.functional.logsigmoid(odds)


def _log_odds(mean_logprobs: Tensor) -> Tensor:
    """Return log(p / (1 - p)), with p kept below 1."""
    limited = mean_logprobs.clamp(max=-1e-6)
    return limited - (-torch.expm1(limited)).log()


def simpo_loss(chosen_mean: Tensor, rejected_mean: Tensor, beta: float, gamma: float) -> Tensor:
    """Return the SimPO loss, (P,), https://arxiv.org/abs/2405.14734 eq. 6, with reward margin
    ``gamma``. The arguments are means over tokens."""
    return -torch.nn.functional.logsigmoid(beta * (chosen_mean - rejected_mean) - gamma)


def pair_reward_loss(
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor | None = None,
    kind: Literal["sigmoid", "logexp"] = "sigmoid",
) -> Tensor:
    """Return the Bradley-Terry loss of a reward model, (P,), https://arxiv.org/abs/2203.02155 eq.
    1. The margin is Llama 2's.

    logexp is log(1 + exp(rejected - chosen)): another formula for the same value; it ignores the
    margin.
    """
    if kind == "logexp":
        return torch.log1p((rejected - chosen).clamp(max=80).exp())
    return -torch.nn.functional.logsigmoid(
        chosen - rejected if margin is None else chosen - rejected - margin
    )
