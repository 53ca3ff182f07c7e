"""Credit on the driver: the run's plan, the KL controller, and what is measured while rewards
become advantages."""

from __future__ import annotations

from collections.abc import Mapping

from openrl.algorithms.credit import CreditPlan, assign_credit
from openrl.algorithms.kl import KLCoefficient, reference_kl
from openrl.algorithms.masked import masked_mean
from openrl.algorithms.shaping import RunningMoments
from openrl.config.algorithm import KLFlags
from openrl.config.derived import kl_controller_acts, kl_in_reward
from openrl.tracking.metrics import Last, Mean, Metric
from openrl.types import ExperienceBatch


class Credit:
    """Turns rewards into advantages, step after step; ``kl`` holds the coefficient now in force."""

    def __init__(self, plan: CreditPlan, flags: KLFlags) -> None:
        self.plan, self.flags = plan, flags
        self.running = RunningMoments()
        self.kl = KLCoefficient(flags.init_kl_coef, flags.kl_target, flags.kl_horizon)

    def __call__(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Metric]]:
        coef = self.kl.coef if kl_in_reward(self.flags) else 0.0
        batch, shaping = assign_credit(batch, self.plan, coef, self.running)
        metrics = credit_metrics(batch, self.plan.kl_estimator)
        if kl_controller_acts(self.flags):
            metrics["kl_coef"] = Last(self.kl.coef)
        return batch, metrics | {f"rollout/{name}": Last(value) for name, value in shaping.items()}

    def adapt(self, metrics: Mapping[str, Metric], n_samples: int) -> None:
        """Let the controller see this step's KL; without a reference there is none to see."""
        if (measured := metrics.get("actor/kl")) and measured.value is not None:
            self.kl.update(measured.value, n_samples)


def credit_metrics(batch: ExperienceBatch, kl_estimator: str) -> dict[str, Metric]:
    """Advantages, values and distances between policies over the sampled tokens; only what was
    computed."""
    mask, tokens = batch.loss_mask, int(batch.loss_mask.sum())
    metrics: dict[str, Metric] = {}

    def add(name: str, column: object) -> None:
        mean = masked_mean(column, mask)  # type: ignore[arg-type]
        metrics[name] = Mean(float(mean) * tokens, tokens)

    assert batch.advantages is not None and batch.returns is not None
    add("rollout/advantage_abs", batch.advantages.abs())
    add("rollout/return", batch.returns)
    if batch.values is not None:
        add("critic/value", batch.values)
    if (kl := reference_kl(batch, kl_estimator)) is not None:
        add("actor/kl", kl)
    return metrics
