"""Engine against trainer, once for each rollout batch: how far apart they are, and what is done
about it."""

from __future__ import annotations

from openrl.algorithms.off_policy import correct_rollouts
from openrl.config.correction import RolloutCorrectionFlags
from openrl.tracking.metrics import Last, Metric
from openrl.training.mismatch import compare, shown
from openrl.types import ExperienceBatch


class Mismatch:
    """``measure`` before rewards become advantages, ``apply`` after: a token or sequence that is
    rejected leaves the loss, but was sampled. It counts in its group's baseline and in its
    response's length, as a truncated one does."""

    def __init__(self, flags: RolloutCorrectionFlags) -> None:
        self.flags = flags

    def measure(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Metric]]:
        """The batch with weights and without rejected tokens, and what was measured; for old
        log-probs of a pass of their own. Without one the update compares its own log-probs with the
        engine's."""
        assert batch.old_logprobs is not None
        corrected, values = correct_rollouts(batch, self.flags)
        gaps = shown(compare(batch.old_logprobs, batch))
        return corrected, gaps | {f"mismatch/{name}": Last(value) for name, value in values.items()}

    def apply(self, credited: ExperienceBatch, corrected: ExperienceBatch) -> ExperienceBatch:
        """The batch with advantages, and with what ``measure`` found."""
        mask = credited.loss_mask & corrected.loss_mask
        return credited.replace(is_weights=corrected.is_weights, loss_mask=mask)
