"""Engine against trainer, once for each rollout batch: how far apart they are, and what is done about it."""

from __future__ import annotations

from openrl.algorithms.masked import masked_mean
from openrl.algorithms.off_policy import correct_rollouts
from openrl.config.correction import RolloutCorrectionFlags
from openrl.tracking.metrics import Last, Max, Mean, Metric
from openrl.types import ExperienceBatch

LEADING = "logprob_gap_max"  # goes by the names that every run has, whoever computes the log-probs


class Mismatch:
    """``measure`` before rewards become advantages, ``apply`` after: a token or sequence that is rejected leaves the
    loss, but was sampled. It counts in its group's baseline and in its response's length, as a truncated one does."""

    def __init__(self, flags: RolloutCorrectionFlags) -> None:
        self.flags = flags

    def measure(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Metric]]:
        """The batch with weights and without rejected tokens, and what was measured.

        Without old log-probs neither: then the update compares its own log-probs with the engine's.
        """
        if batch.old_logprobs is None:
            return batch, {}
        corrected, values = correct_rollouts(batch, self.flags)
        tokens = int(batch.loss_mask.sum())
        gap = masked_mean((batch.old_logprobs - batch.rollout_logprobs).abs(), batch.loss_mask)
        metrics: dict[str, Metric] = {"actor/logprob_gap": Mean(float(gap) * tokens, tokens)}
        if LEADING in values:
            metrics[f"actor/{LEADING}"] = Max(values.pop(LEADING))
        return corrected, metrics | {f"mismatch/{name}": Last(value) for name, value in values.items()}

    def apply(self, credited: ExperienceBatch, corrected: ExperienceBatch) -> ExperienceBatch:
        """The batch with advantages, and with what ``measure`` found."""
        mask = credited.loss_mask & corrected.loss_mask
        return credited.replace(is_weights=corrected.is_weights, loss_mask=mask)
