"""Rollouts come from an engine whose numerics differ, or whose weights are older: weights and tests for that.

rho = exp(old_logp - rollout_logp) is the ratio of the trainer's policy before the update to the one that sampled.
Both are known before training, so weights and rejections are computed once for the whole rollout batch. They never
enter the policy ratio of the loss. torch only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openrl.algorithms.masked import masked_mean, masked_sum, segment_mean, sequence_mean
from openrl.config.correction import (
    CorrectionLevel,
    RejectionTest,
    RolloutCorrectionFlags,
    rejection_tests,
)
from openrl.types import ExperienceBatch

LIMIT = 20.0  # of a log-ratio before exp


def correct_rollouts(batch: ExperienceBatch, flags: RolloutCorrectionFlags) -> tuple[ExperienceBatch, dict[str, float]]:
    """Fill ``is_weights`` and take what fails a test out of ``loss_mask``; also metrics, correction on or off."""
    log_rho = _log_rho(batch)
    metrics = mismatch_metrics(batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask)
    if flags.enable_vllm_is_correction:
        weights = importance_weights(log_rho, batch.loss_mask, batch.turn_ids, flags)
        metrics |= weight_metrics(weights, log_rho, batch.loss_mask, flags.vllm_is_truncated_threshold)
        batch = batch.replace(is_weights=weights)
    tests = rejection_tests(flags)
    if tests:
        kept = batch.loss_mask
        for test in tests:
            kept = kept & passes(log_rho, batch.loss_mask, test)
        lost = batch.members & ~kept.any(-1)
        metrics["rejected_tokens"] = float(masked_mean((~kept).float(), batch.loss_mask))
        metrics["rejected_sequences"] = float(masked_mean(lost.float(), batch.members))
        batch = batch.replace(loss_mask=kept)
    return batch, metrics


def _log_rho(batch: ExperienceBatch) -> Tensor:
    return (batch.old_logprobs - batch.rollout_logprobs).masked_fill(~batch.loss_mask, 0)


def importance_weights(log_rho: Tensor, mask: Tensor, turn_ids: Tensor, flags: RolloutCorrectionFlags) -> Tensor:
    """(B, T) factor of each token's policy loss, 0 outside the mask.

    tis, https://fengyao.notion.site/off-policy-rl; icepop, https://arxiv.org/abs/2510.18855; seq-mask-tis drops whole
    sequences by their geometric mean and keeps the others' weights as they are. Denominators of the loss do not change.
    """
    low, high = flags.vllm_is_truncated_threshold
    if flags.correction_type == "seq-mask-tis":
        weights = log_rho.clamp(-LIMIT, LIMIT).exp()
        mean = at_level(log_rho, mask, turn_ids, "geometric").exp()
        weights = weights * ((mean >= low) & (mean <= high))
    else:
        weights = at_level(log_rho, mask, turn_ids, flags.vllm_is_level).exp()
        inside = (weights >= low) & (weights <= high)
        weights = weights.clamp(low, high) if flags.correction_type == "tis" else weights * inside
    weights = weights.masked_fill(~mask, 0)
    if flags.vllm_is_batch_normalize:
        weights = weights / masked_mean(weights, mask).clamp(min=1e-8)
    return weights


def at_level(log_rho: Tensor, mask: Tensor, turn_ids: Tensor, level: CorrectionLevel) -> Tensor:
    """Log-ratio of what one weight covers, on each of its tokens, within +-20; (B, T)."""
    if level == "geometric":
        log_rho = sequence_mean(log_rho, mask)
    elif level == "segment":
        log_rho = segment_mean(log_rho, turn_ids.masked_fill(~mask, -1))
    elif level == "sequence":
        log_rho = masked_sum(log_rho, mask, -1)[:, None] * mask
    return log_rho.clamp(-LIMIT, LIMIT)


def passes(log_rho: Tensor, mask: Tensor, test: RejectionTest) -> Tensor:
    """(B, T) bool: tokens that a rejection test lets through; a sequence passes or fails as a whole.

    k1 = -log rho, so its bounds are of rollout / old; k2 = (log rho)^2 / 2; k3 = rho - 1 - log rho.
    """
    limited = log_rho.clamp(-LIMIT, LIMIT)
    values = {"k1": -limited, "k2": limited.square() / 2, "k3": torch.expm1(limited) - limited}[test.estimator]
    if test.level == "seq_sum":
        values = masked_sum(values, mask, -1)[:, None]
    elif test.level == "seq_mean":
        values = masked_mean(values, mask, -1)[:, None]
    elif test.level == "seq_max":
        values = values.masked_fill(~mask, 0).amax(-1, keepdim=True)
    return ((values >= test.low) & (values <= test.high)).expand_as(mask)


def mismatch_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far trainer and engine are apart over the sampled tokens; empty without any.

    kl and k3_kl in nats per token, of the engine's policy to the trainer's; ppl_ratio old / rollout perplexity, a mean
    over sequences; chi2 of tokens and of sequences; ess, the effective share of samples under weights rho, in (0, 1].
    """
    if not bool(mask.any()):
        return {}
    raw = (old_logprobs - rollout_logprobs).double().masked_fill(~mask, 0)
    log_rho = raw.clamp(-LIMIT, LIMIT)
    rho, rows = log_rho.exp(), mask.any(-1)
    sequence = masked_sum(raw, mask, -1).clamp(-LIMIT, LIMIT)
    per_token = masked_mean(raw, mask, -1).clamp(-LIMIT, LIMIT)
    old_p, rollout_p = (logprobs.clamp(max=0).exp() for logprobs in (old_logprobs, rollout_logprobs))
    probability_gap = (old_p - rollout_p).abs().masked_fill(~mask, 0)
    columns = {
        "kl": masked_mean(-raw, mask),
        "k3_kl": masked_mean(torch.expm1(log_rho) - log_rho, mask),
        "ppl_ratio": masked_mean((-per_token).exp(), rows),
        "chi2_token": masked_mean(rho.square(), mask) - 1,
        "chi2_sequence": masked_mean((2 * sequence).exp(), rows) - 1,
        "ess": _effective_share(rho, mask),
        "logprob_gap_max": raw.abs().max(),
        "prob_gap_mean": masked_mean(probability_gap, mask),
        "prob_gap_max": probability_gap.max(),
    }
    return {name: float(value) for name, value in columns.items()}


def weight_metrics(weights: Tensor, log_rho: Tensor, mask: Tensor, threshold: tuple[float, float]) -> dict[str, float]:
    """Of the weights in force: mean, extremes, effective share of samples, share of tokens with rho out of bounds."""
    if not bool(mask.any()):
        return {}
    rho = log_rho.clamp(-LIMIT, LIMIT).exp()
    low, high = threshold
    inside = weights[mask]
    return {
        "is_weight_mean": float(inside.mean()),
        "is_weight_min": float(inside.min()),
        "is_weight_max": float(inside.max()),
        "is_weight_ess": float(_effective_share(weights, mask)),
        "is_ratio_high": float(masked_mean((rho > high).float(), mask)),
        "is_ratio_low": float(masked_mean((rho < low).float(), mask)),
    }


def _effective_share(weights: Tensor, mask: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2), Kish's effective sample size as a share."""
    mean, square = masked_mean(weights, mask), masked_mean(weights.square(), mask)
    return mean.square() / square.clamp(min=1e-30)
