"""Credit assignment on the driver: the run's plan, the KL controller, and the metrics of turning
rewards into advantages."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from openrl.algorithms.credit import CreditPlan, assign_credit
from openrl.algorithms.kl import KLCoefficient, reference_kl
from openrl.algorithms.masked import masked_metrics
from openrl.algorithms.shaping import RunningMoments
from openrl.config.groups.algorithm import KLFlags
from openrl.experience import ExperienceBatch
from openrl.metrics import Last, Metric


class Credit:
    """Turns rewards into advantages, step after step. ``kl`` holds the current KL coefficient."""

    def __init__(self, plan: CreditPlan, flags: KLFlags) -> None:
        self.plan, self.flags = plan, flags
        self.running = RunningMoments()
        self.kl = KLCoefficient(flags.init_kl_coef, flags.kl_target, flags.kl_horizon)

    def __call__(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Metric]]:
        coef = self.kl.coef if self.flags.in_reward else 0.0
        batch, shaping = assign_credit(batch, self.plan, coef, self.running)
        metrics = credit_metrics(batch)
        if self.flags.controlled:
            metrics["kl_coef"] = Last(self.kl.coef)
        return batch, metrics | {f"rollout/{name}": Last(value) for name, value in shaping.items()}

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


def credit_metrics(batch: ExperienceBatch) -> dict[str, Metric]:
    """Return the means of advantages, returns and, if computed, values over the sampled tokens."""
    assert batch.advantages is not None and batch.returns is not None
    columns = {"rollout/advantage_abs": batch.advantages.abs(), "rollout/return": batch.returns}
    if batch.values is not None:
        columns["critic/value"] = batch.values
    return masked_metrics(columns, batch.loss_mask)
