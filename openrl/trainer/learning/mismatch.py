"""The mismatch between engine and trainer: how far apart their log-probs are, and its correction,
once per rollout batch."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from openrl.algorithms.off_policy import correct_rollouts, mismatch_figures
from openrl.config.groups.rollout_correction import RolloutCorrectionFlags
from openrl.experience import ExperienceBatch
from openrl.metrics import Last, Metric, merge_all
from openrl.trainer.learning.nonfinite import Reports
from openrl.training.updates import COMPARED

LEADING = ("logprob_gap", "logprob_gap_max")  # logged among the actor's metrics


def mismatch_of_update(reports: Reports) -> dict[str, Metric]:
    """Return what an update measured; empty if it was not to compare. Only the first optimizer step
    runs with the weights that sampled, so only it counts."""
    first = merge_all(rank[0] for rank in reports)
    compared = {n.removeprefix(COMPARED): m for n, m in first.items() if n.startswith(COMPARED)}
    return _logged(mismatch_figures(compared))


def correct_mismatch(
    batch: ExperienceBatch, rows: Tensor, flags: RolloutCorrectionFlags
) -> tuple[ExperienceBatch, dict[str, Metric]]:
    """Return the batch with importance weights and without rejected tokens, and the metrics. Needs
    old log-probs from a forward pass, which ``rows`` (B,) bool have; in runs without one, the
    update itself compares its log-probs with the engine's and weighs its tokens.

    A rejected token or sequence leaves the loss after credit assignment: since it was sampled, it
    still counts in its group's baseline and in the response length, as a truncated one does."""
    compared = batch.loss_mask & rows[:, None]
    corrected, figures = correct_rollouts(batch.replace(loss_mask=compared), flags)
    kept = batch.loss_mask & (corrected.loss_mask | ~compared)
    batch = batch.replace(is_weights=corrected.is_weights, loss_mask=kept)
    return batch, _logged(figures)


def _logged(figures: Mapping[str, float]) -> dict[str, Metric]:
    """Return the figures of a comparison under the names that are logged."""
    homes = {name: "actor" if name in LEADING else "mismatch" for name in figures}
    return {f"{homes[name]}/{name}": Last(value) for name, value in figures.items()}
