"""Off-policy correction of rollouts whose engine computes differently or has older weights.

rho = exp(old_logp - rollout_logp) is the ratio of the trainer's policy before the update to the
policy that sampled. Both are known before training, so weights and rejections are computed once for
the whole rollout batch (``correct_rollouts``). If a rollout is a single optimizer step and a weight
depends on its own row alone, the step computes it from its own log-probs, and needs no pass before
it (``weigh``). Neither weights nor rejections enter the policy ratio of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from openrl.algorithms.masked import masked_mean, masked_sum, segment_mean
from openrl.algorithms.trajectories import Trajectories
from openrl.config.groups.rollout_correction import (
    CorrectionLevel,
    RejectionTest,
    RolloutCorrectionFlags,
    rejection_tests,
)
from openrl.experience import ExperienceBatch
from openrl.metrics import Max, Mean, Metric, Min, to_floats

LIMIT = 20.0  # of a log-ratio, before exp


def ages(batch: ExperienceBatch, version: int) -> Tensor:
    """Return each token's age, (B, T) int: how many syncs lie between the weights that sampled
    it and ``version``, the weights that the step trains. It is -1 where the version is unknown and
    on tokens that were not sampled."""
    if batch.versions is None:
        return torch.full_like(batch.token_ids, -1)
    return torch.where(batch.loss_mask & (batch.versions >= 0), version - batch.versions, -1)


def stale_tokens(batch: ExperienceBatch, version: int, max_staleness: int) -> Tensor:
    """Return (B, T) bool, True on tokens older than ``max_staleness`` syncs."""
    return ages(batch, version) > max_staleness


def age_metrics(batch: ExperienceBatch, version: int) -> dict[str, float]:
    """Return the mean and the largest age of sampled tokens; nothing if none is known."""
    age = ages(batch, version)
    known = age[age >= 0].double()
    return {"age_mean": float(known.mean()), "age_max": float(known.max())} if len(known) else {}


def correct_rollouts(
    batch: ExperienceBatch, flags: RolloutCorrectionFlags
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Fill ``is_weights``, remove what fails a test from ``loss_mask``, and return the batch and
    metrics. Means count the tokens in ``loss_mask`` as it was on entry."""
    weights, compared = weigh(batch, batch.old_logprobs, flags)
    metrics, kept = mismatch_figures(compared), batch.loss_mask
    tests = rejection_tests(flags)
    if tests and kept.any():
        log_rho = _log_rho(batch, batch.old_logprobs)
        for test in tests:
            kept = kept & accepted_tokens(log_rho, batch, test)
        sampled = Trajectories.of(batch).lengths > 0
        lost = sampled & (Trajectories.of(batch.replace(loss_mask=kept)).lengths == 0)
        metrics["rejected_tokens"] = float(masked_mean((~kept).float(), batch.loss_mask))
        metrics["rejected_sequences"] = float(masked_mean(lost.float(), sampled))
    return batch.replace(is_weights=weights, loss_mask=kept), metrics


@torch.no_grad()
def weigh(
    batch: ExperienceBatch, logprobs: Tensor, flags: RolloutCorrectionFlags
) -> tuple[Tensor | None, dict[str, Metric]]:
    """Compare ``logprobs``, (B, T), of the trainer's policy before the update with the engine's.
    Returns the importance weights, (B, T), and ``mismatch_metrics``. Without
    --enable_vllm_is_correction the weights are None."""
    weights = None
    if flags.enable_vllm_is_correction:
        weights = importance_weights(_log_rho(batch, logprobs), batch, flags)
    bounds = flags.vllm_is_truncated_threshold
    rollout_logprobs, mask = batch.rollout_logprobs, batch.loss_mask
    return weights, mismatch_metrics(logprobs, rollout_logprobs, mask, weights, bounds)


def _log_rho(batch: ExperienceBatch, logprobs: Tensor) -> Tensor:
    return (logprobs - batch.rollout_logprobs).masked_fill(~batch.loss_mask, 0)


def importance_weights(
    log_rho: Tensor, batch: ExperienceBatch, flags: RolloutCorrectionFlags
) -> Tensor:
    """Return the factor of each token's policy loss, (B, T), 0 outside the mask. A sequence is a
    trajectory with all its rows.

    The types are tis (https://fengyao.notion.site/off-policy-rl), icepop
    (https://arxiv.org/abs/2510.18855), and seq-mask-tis, which drops whole sequences by their
    geometric mean. The denominators of the loss do not change.
    """
    low, high = flags.vllm_is_truncated_threshold
    if flags.correction_type == "seq-mask-tis":
        weights = log_rho.clamp(-LIMIT, LIMIT).exp()
        mean = log_ratio_at_level(log_rho, batch, "geometric").exp()
        weights = weights * ((mean >= low) & (mean <= high))
    else:
        weights = log_ratio_at_level(log_rho, batch, flags.vllm_is_level).exp()
        inside = (weights >= low) & (weights <= high)
        weights = weights.clamp(low, high) if flags.correction_type == "tis" else weights * inside
    weights = weights.masked_fill(~batch.loss_mask, 0)
    if flags.vllm_is_batch_normalize:
        return batch_normalised(weights, batch, flags.weight_covers)
    return weights


def batch_normalised(weights: Tensor, batch: ExperienceBatch, covers: CorrectionLevel) -> Tensor:
    """Divide the weights by their mean in the batch, as verl does. The mean is over tokens, or over
    sequences where each has one weight.

    The batch is the whole rollout's: no weight depends on the optimizer step of its row.
    """
    if covers in ("sequence", "geometric"):
        trajectories = Trajectories.of(batch)
        totals, tokens = trajectories.total(weights.sum(-1)), trajectories.lengths
        mean = masked_mean(totals / tokens.clamp(min=1), tokens > 0)
    else:
        mean = masked_mean(weights, batch.loss_mask)
    return weights / mean.clamp(min=1e-8)


def log_ratio_at_level(log_rho: Tensor, batch: ExperienceBatch, level: CorrectionLevel) -> Tensor:
    """Return the log-ratio of what one weight covers on each of its tokens, within +-20, (B, T)."""
    mask = batch.loss_mask
    if level == "geometric":
        log_rho = _sequence_mean(log_rho, batch) * mask
    elif level == "segment":
        log_rho = segment_mean(log_rho, batch.turn_ids.masked_fill(~mask, -1))
    elif level == "sequence":
        log_rho = _sequence_sum(log_rho, batch) * mask
    return log_rho.clamp(-LIMIT, LIMIT)


def _sequence_sum(values: Tensor, batch: ExperienceBatch) -> Tensor:
    """Return the sum over the trajectory's sampled tokens, (B, 1)."""
    return batch.trajectory_sums(masked_sum(values, batch.loss_mask, -1))[:, None]


def _sequence_mean(values: Tensor, batch: ExperienceBatch) -> Tensor:
    """Return the mean over the trajectory's sampled tokens, (B, 1)."""
    tokens = batch.trajectory_sums(batch.response_lengths)[:, None]
    return _sequence_sum(values, batch) / tokens.clamp(min=1)


def accepted_tokens(log_rho: Tensor, batch: ExperienceBatch, test: RejectionTest) -> Tensor:
    """Return (B, T) bool, True on tokens that pass a rejection test. A sequence, which is a
    trajectory with all its rows, passes or fails as a whole; with opsm those of its tokens fail
    whose advantage is below 0 (https://arxiv.org/abs/2512.02556 section 3.1)."""
    values = _ESTIMATORS[test.estimator](log_rho.clamp(-LIMIT, LIMIT), batch.rollout_logprobs)
    if test.level == "batch":
        return below_mean(values, batch.loss_mask, test.high)
    if test.level == "seq_sum":
        values = _sequence_sum(values, batch)
    elif test.level == "seq_mean":
        values = _sequence_mean(values, batch)
    elif test.level == "seq_max":
        trajectories, values = Trajectories.of(batch), values.masked_fill(~batch.loss_mask, 0)
        values = trajectories.spread(trajectories.gather(values).amax(-1))[:, None]
    passed = ((values >= test.low) & (values <= test.high)).expand_as(batch.loss_mask)
    if test.estimator == "opsm":
        assert batch.advantages is not None  # rewards are credited before
        return passed | (batch.advantages >= 0)
    return passed


def below_mean(values: Tensor, mask: Tensor, limit: float) -> Tensor:
    """Return (B, T) bool, True on as many of the smallest masked values as have a mean of at most
    ``limit``. Of equal values all are in or none. M2PO's choice of tokens,
    https://arxiv.org/abs/2510.01161 algorithm 1."""
    ordered = values[mask].double().sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=values.device)
    count = int((means <= limit).sum())
    return values < ordered[count] if count < len(ordered) else torch.ones_like(mask)


def probability_gap(log_rho: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return by how much the probability of each token differs, in either direction."""
    return ((rollout_logprobs + log_rho).exp() - rollout_logprobs.exp()).abs()


def binary_kl(log_rho: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return the KL between the two-way choices "this token or another", in the direction in which
    it is larger; https://ringtech.notion.site/kpop (KPop)."""
    tiny = 1e-6
    logs = (rollout_logprobs + log_rho, rollout_logprobs)
    p, q = (column.double().exp().clamp(tiny, 1 - tiny) for column in logs)
    own, other = (p / q).log(), ((1 - p) / (1 - q)).log()
    return torch.maximum(p * own + (1 - p) * other, -q * own - (1 - q) * other)


# Each is a function of log rho, clamped to +-20, and of the engine's log-probs.
_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": lambda log_rho, _: -log_rho,  # so bounds are of rollout / old
    "opsm": lambda log_rho, _: -log_rho,
    "k2": lambda log_rho, _: log_rho.square() / 2,
    "k3": lambda log_rho, _: torch.expm1(log_rho) - log_rho,
    "m2": lambda log_rho, _: log_rho.square(),
    # IPO of prime-rl (559b447), no paper; https://arxiv.org/abs/2602.04879 without the sign
    "tv": probability_gap,
    "binary_kl": binary_kl,
}


def mismatch_metrics(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    bounds: tuple[float, float] = (0.0, math.inf),
) -> dict[str, Metric]:
    """Measure the sampled tokens of whole rows, (b, T), with rho = exp(logprobs -
    rollout_logprobs) and log-ratios clamped to +-20. ``logprobs`` are the trainer's, under the
    weights before the update. With importance ``weights`` the metrics describe them, too, and count
    the tokens whose rho is out of ``bounds``. Those of parts of a batch merge into the batch's."""
    raw = (logprobs - rollout_logprobs).double().masked_fill(~mask, 0)
    log_rho, rows = raw.clamp(-LIMIT, LIMIT), mask.any(-1)
    sequence = masked_sum(raw, mask, -1).clamp(-LIMIT, LIMIT)
    per_token = masked_mean(raw, mask, -1).clamp(-LIMIT, LIMIT)
    p, rollout_p = (column.clamp(max=0).exp() for column in (logprobs, rollout_logprobs))
    gap = (p - rollout_p).abs().double().masked_fill(~mask, 0)
    rho = log_rho.exp()
    of_tokens = {
        "kl": -raw,
        "k3_kl": torch.expm1(log_rho) - log_rho,
        "rho": rho,
        "rho_squared": rho.square(),
        "logprob_gap": raw.abs(),
        "prob_gap_mean": gap,
        "bitwise_frac": (logprobs == rollout_logprobs).double(),
    }
    of_rows = {"ppl_ratio": (-per_token).exp(), "sequence_rho_squared": (2 * sequence).exp()}
    maxima, minima = {"logprob_gap_max": raw.abs().amax(), "prob_gap_max": gap.amax()}, {}
    if weights is not None:
        (low, high), weights = bounds, weights.double()
        of_tokens |= {"is_weight_mean": weights, "is_weight_squared": weights.square()}
        of_tokens |= {"is_ratio_high": rho > high, "is_ratio_low": rho < low}
        maxima["is_weight_max"] = weights.amax()
        minima["is_weight_min"] = weights.masked_fill(~mask, math.inf).amin()
    sums = [masked_sum(column, mask) for column in of_tokens.values()]
    sums += [masked_sum(column, rows) for column in of_rows.values()]
    # one transfer from the device for all figures
    extremes = [*maxima.values(), *minima.values()]
    *values, n_tokens, n_rows = torch.stack([*sums, *extremes, mask.sum(), rows.sum()]).tolist()
    found = iter(values)
    metrics: dict[str, Metric] = {name: Mean(next(found), n_tokens) for name in of_tokens}
    metrics |= {name: Mean(next(found), n_rows) for name in of_rows}
    metrics |= {name: Max(next(found)) for name in maxima}
    return metrics | {name: Min(next(found)) for name in minima}


def mismatch_figures(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the figures to log from ``mismatch_metrics``; empty without a sampled token.

    kl and k3_kl are in nats per token, of the engine's policy to the trainer's; ppl_ratio is the
    trainer's perplexity divided by the engine's, averaged over rows; chi2 exists for tokens and for
    rows; ess, in (0, 1], is the effective share of samples (Kish) under weights rho, is_weight_ess
    under the importance weights; is_ratio_high and is_ratio_low are the shares of tokens whose rho
    is out of bounds.
    """
    figures = to_floats(metrics)
    if "kl" not in figures:
        return {}
    rho_squared = figures.pop("rho_squared")
    figures["chi2_token"] = rho_squared - 1
    figures["chi2_sequence"] = figures.pop("sequence_rho_squared") - 1
    figures["ess"] = figures.pop("rho") ** 2 / rho_squared
    if "is_weight_mean" in figures:
        squared = max(figures.pop("is_weight_squared"), 1e-30)
        figures["is_weight_ess"] = figures["is_weight_mean"] ** 2 / squared
    return figures
