"""Engine against trainer, once for each rollout batch: how far apart they are, and what is done
about it."""

from __future__ import annotations

from torch import Tensor

from openrl.algorithms.off_policy import MismatchTotals, correct_rollouts, mismatch_totals
from openrl.config.correction import RolloutCorrectionFlags
from openrl.experience import ExperienceBatch
from openrl.tracking.metrics import Last, Metric

LEADING = ("logprob_gap", "logprob_gap_max")  # shown among the actor's figures


def figures(totals: object) -> dict[str, Metric]:
    """The figures of a run, from merged ``MismatchTotals``; none where an update measured none."""
    shown = totals.figures() if isinstance(totals, MismatchTotals) else {}
    return {
        ("actor/" if name in LEADING else "mismatch/") + name: Last(value)
        for name, value in shown.items()
    }


class Mismatch:
    """Acts after rewards have become advantages: a token or sequence that is rejected leaves the
    loss, but was sampled. It counts in its group's baseline and in its response's length, as a
    truncated one does."""

    def __init__(self, flags: RolloutCorrectionFlags) -> None:
        self.flags = flags

    def __call__(
        self, batch: ExperienceBatch, sampled: Tensor
    ) -> tuple[ExperienceBatch, dict[str, Metric]]:
        """The batch with weights and without rejected tokens, and what was measured; for old
        log-probs of a pass of their own. Without one the update compares its own log-probs with the
        engine's.

        ``sampled`` (B, T) bool: the tokens with an old log-prob that the engine sampled, also those
        that credit took out of the loss."""
        assert batch.old_logprobs is not None
        corrected, values = correct_rollouts(batch.replace(loss_mask=sampled), self.flags)
        totals = mismatch_totals(batch.old_logprobs, batch.rollout_logprobs, sampled)
        done = {f"mismatch/{name}": Last(value) for name, value in values.items()}
        rejected = sampled & ~corrected.loss_mask
        kept = batch.loss_mask & ~rejected
        return batch.replace(is_weights=corrected.is_weights, loss_mask=kept), figures(
            totals
        ) | done
