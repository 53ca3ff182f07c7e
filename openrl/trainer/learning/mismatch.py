"""The mismatch between engine and trainer: how far apart their log-probs are, and its correction,
once per rollout batch."""

from __future__ import annotations

from torch import Tensor

from openrl.algorithms.off_policy import MismatchTotals, correct_rollouts, mismatch_totals
from openrl.config.groups.rollout_correction import RolloutCorrectionFlags
from openrl.experience import ExperienceBatch
from openrl.tracking.metrics import Last, Metric

LEADING = ("logprob_gap", "logprob_gap_max")  # logged among the actor's metrics


def mismatch_metrics(totals: object) -> dict[str, Metric]:
    """Return the mismatch metrics from merged ``MismatchTotals``; empty for anything else, i.e. if
    the update measured none."""
    shown = totals.metrics() if isinstance(totals, MismatchTotals) else {}
    return {
        ("actor/" if name in LEADING else "mismatch/") + name: Last(value)
        for name, value in shown.items()
    }


class Mismatch:
    """Corrects for the mismatch after advantages are computed. A rejected token or sequence leaves
    the loss, but since it was sampled, it still counts in its group's baseline and in the response
    length, as a truncated one does."""

    def __init__(self, flags: RolloutCorrectionFlags) -> None:
        self.flags = flags

    def __call__(
        self, batch: ExperienceBatch, sampled: Tensor
    ) -> tuple[ExperienceBatch, dict[str, Metric]]:
        """Return the batch with importance weights and without rejected tokens, and the metrics.
        Needs old log-probs from a forward pass; in runs without one, the update itself compares its
        log-probs with the engine's.

        ``sampled`` (B, T) bool marks the tokens that the engine sampled and that have an old
        log-prob, including those that credit assignment took out of the loss."""
        assert batch.old_logprobs is not None
        corrected, values = correct_rollouts(batch.replace(loss_mask=sampled), self.flags)
        totals = mismatch_totals(batch.old_logprobs, batch.rollout_logprobs, sampled)
        done = {f"mismatch/{name}": Last(value) for name, value in values.items()}
        rejected = sampled & ~corrected.loss_mask
        kept = batch.loss_mask & ~rejected
        return batch.replace(is_weights=corrected.is_weights, loss_mask=kept), mismatch_metrics(
            totals
        ) | done
