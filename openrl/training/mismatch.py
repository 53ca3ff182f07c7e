"""Engine against trainer as metrics: measured in parts, merged over micro-batches and ranks, then
shown."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from openrl.algorithms.off_policy import mismatch_metrics, mismatch_totals
from openrl.tracking.metrics import Last, Max, Mean, Metric
from openrl.types import ExperienceBatch

PREFIX = "mismatch/"
LEADING = ("logprob_gap", "logprob_gap_max")  # shown among the actor's figures


def compare(logprobs: Tensor, batch: ExperienceBatch) -> dict[str, Metric]:
    """Mergeable totals over the sampled tokens; ``logprobs`` (b, T) are of the weights that
    sampled, by the trainer."""
    totals = mismatch_totals(logprobs, batch.rollout_logprobs, batch.loss_mask)
    found: dict[str, Metric] = {PREFIX + name: Mean(*total) for name, total in totals.sums.items()}
    return found | {PREFIX + name: Max(value) for name, value in totals.maxima.items()}


def split(metrics: Mapping[str, Metric]) -> tuple[dict[str, Metric], dict[str, Metric]]:
    """(totals of ``compare``, everything else)."""
    totals = {name: m for name, m in metrics.items() if name.startswith(PREFIX)}
    return totals, {name: m for name, m in metrics.items() if name not in totals}


def shown(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """The figures of a run, from merged totals; none without a sampled token."""
    means = {
        name.removeprefix(PREFIX): m.value for name, m in metrics.items() if name.startswith(PREFIX)
    }
    known = {name: value for name, value in means.items() if value is not None}
    if not known:
        return {}
    figures = mismatch_metrics(known) | {
        name: known[name] for name in known if name.endswith("_max")
    }
    return {
        ("actor/" if name in LEADING else PREFIX) + name: Last(value)
        for name, value in figures.items()
    }
