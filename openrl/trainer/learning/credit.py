"""Credit assignment on the driver, and the mismatch between engine and trainer: how far apart their
log-probs are, and its correction, once per rollout batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from openrl.algorithms.credit import CreditSettings, compute_advantages
from openrl.algorithms.credit_routes import CreditRoute, advantages_by_source
from openrl.algorithms.kl import KLCoefficient, reference_kl
from openrl.algorithms.masked import masked_metrics
from openrl.algorithms.off_policy import correct_rollouts, mismatch_figures
from openrl.algorithms.shaping import RunningMoments
from openrl.config.groups.algorithm import KLFlags
from openrl.config.groups.rollout_correction import RolloutCorrectionFlags
from openrl.experience import ExperienceBatch
from openrl.metrics import Last, Metric, merge_all
from openrl.trainer.learning.nonfinite import Reports
from openrl.training_engine.updates import COMPARED

LEADING = ("logprob_gap", "logprob_gap_max")  # logged among the actor's metrics


class CreditAssignment:
    """Turns rewards into advantages, step after step. ``kl`` holds the current KL coefficient."""

    def __init__(
        self,
        plan: CreditSettings,
        flags: KLFlags,
        routes: Mapping[str, CreditRoute] | None = None,
    ) -> None:
        """``routes``: how the rows of some data sources differ from ``plan``."""
        self.plan, self.flags, self.routes = plan, flags, routes or {}
        self.running = RunningMoments()
        self.kl = KLCoefficient(flags.init_kl_coef, flags.kl_target, flags.kl_horizon)

    def __call__(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Metric]]:
        coef = self.kl.coef if self.flags.in_reward else 0.0
        shaping: dict[str, Metric]
        if self.routes:
            default = CreditRoute(self.plan, running=self.running)
            batch, shaping = advantages_by_source(batch, self.routes, default, coef)
        else:
            batch, figures = compute_advantages(batch, self.plan, coef, self.running)
            shaping = {name: Last(value) for name, value in figures.items()}
        metrics = credit_metrics(batch)
        if self.flags.controlled:
            metrics["kl_coef"] = Last(self.kl.coef)
        return batch, metrics | {f"rollout/{name}": value for name, value in shaping.items()}

    def state(self) -> dict[str, Any]:
        """Return what the credit of later steps depends on."""
        routed = {source: route.running.state() for source, route in self.routes.items()}
        return {"kl": self.kl.state(), "rewards": self.running.state(), "routed": routed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state``; a source that is new starts anew."""
        self.kl.load_state(state["kl"])
        self.running.load_state(state["rewards"])
        for source, saved in state.get("routed", {}).items():
            if source in self.routes:
                self.routes[source].running.load_state(saved)

    def measure_kl(self, batch: ExperienceBatch, rows: Tensor) -> dict[str, Metric]:
        """Measure the KL of the policy before its update to the reference model, in
        ``rows`` (B,) bool. Empty if the batch lacks the columns for it."""
        kl = reference_kl(batch, self.plan.kl_estimator)
        if kl is None:
            return {}
        columns = {"actor/kl": kl}
        if self.flags.in_reward:  # verl's name for a KL that is subtracted from the reward
            columns["actor/reward_kl_penalty"] = kl
        return masked_metrics(columns, batch.loss_mask & rows[:, None])

    def adapt(self, metrics: Mapping[str, Metric], n_samples: int) -> None:
        """Update the controller with this step's KL, if it was measured."""
        if (measured := metrics.get("actor/kl")) and measured.value is not None:
            self.kl.update(measured.value, n_samples)


def clip_note(step: int, metrics: Mapping[str, Metric]) -> str | None:
    """Warn of a step in which --reward_clip_range clipped every reward."""
    clipped = metrics.get("rollout/reward_clip_fraction")
    if clipped is None or clipped.value != 1:
        return None
    return (
        f"WARNING: --reward_clip_range clips every reward of step {step}: how far they differ is"
        " lost\n  try: a wider range, or a smaller scale of rewards"
    )


def credit_metrics(batch: ExperienceBatch) -> dict[str, Metric]:
    """Return the means of advantages, returns and, if computed, values over the sampled tokens."""
    assert batch.advantages is not None and batch.returns is not None
    columns = {"rollout/advantage_abs": batch.advantages.abs(), "rollout/return": batch.returns}
    if batch.values is not None:
        columns["critic/value"] = batch.values
    return masked_metrics(columns, batch.loss_mask)


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
