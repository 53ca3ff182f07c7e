"""The losses of one optimizer step on compared or rated answers. ``updates.py`` has the losses on
tokens.

They divide by ``StepCounts.trajectories``, which counts pairs where rows come in pairs
(``batching.plan_pairs``), otherwise rated answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from openrl.algorithms.masked import masked_mean, masked_metrics, masked_sum, step_loss
from openrl.algorithms.preference_losses import pair_reward_loss, split_pairs
from openrl.experience import AnswerInputs, PreferenceBatch, StepCounts
from openrl.extension_points import preference_losses
from openrl.metrics import Metric
from openrl.training_engine.updates import Forward, Measured


@dataclass(frozen=True)
class PreferenceUpdate:
    """A registered preference loss + nll_coef * the mean negative log-likelihood of the chosen
    answers.

    That mean is taken over the tokens of each answer first and then over answers, since each pair
    counts once in the loss."""

    loss: str  # name in the registry
    options: Any  # that loss's options
    beta: float
    nll_coef: float = 0.0

    def __call__(self, forward: Forward, batch: PreferenceBatch, counts: StepCounts) -> Measured:
        logprobs, _ = forward(batch)
        answers = AnswerInputs(
            logprobs=masked_sum(logprobs, batch.loss_mask, -1),
            mean_logprobs=masked_mean(logprobs, batch.loss_mask, -1),
            ref_logprobs=(
                torch.zeros_like(batch.passed) if batch.ref_answers is None else batch.ref_answers
            ),
            passed=batch.passed,
            beta=self.beta,
            kl=batch.kl,
        )
        entry = preference_losses[self.loss]
        result = entry.component(answers, self.options)
        paired = "ratings" not in entry.needs
        valid = split_pairs(batch.valid)[0] if paired else batch.valid
        loss = mean_over_step(result.losses, valid, counts)
        metrics = masked_metrics({"loss": result.losses}, valid)
        metrics |= _reward_metrics(result.rewards, batch, paired)
        if self.nll_coef:
            nll = -split_pairs(answers.mean_logprobs)[0]
            loss = loss + self.nll_coef * mean_over_step(nll, valid, counts)
            metrics |= masked_metrics({"nll_loss": nll}, valid)
        return loss, metrics


@dataclass(frozen=True)
class PairRewardUpdate:
    """A reward model's loss on pairs. With ``margin`` each pair's own margin is subtracted from the
    difference of its rewards."""

    kind: Literal["sigmoid", "logexp"] = "sigmoid"
    margin: bool = False

    def __call__(self, forward: Forward, batch: PreferenceBatch, counts: StepCounts) -> Measured:
        assert batch.margins is not None
        rewards, _ = forward(batch)
        margin = split_pairs(batch.margins)[0] if self.margin else None
        losses = pair_reward_loss(*split_pairs(rewards), margin, self.kind)
        valid = split_pairs(batch.valid)[0]
        metrics = masked_metrics({"loss": losses}, valid)
        metrics |= _reward_metrics(rewards, batch, paired=True)
        return mean_over_step(losses, valid, counts), metrics


def mean_over_step(values: Tensor, valid: Tensor, counts: StepCounts) -> Tensor:
    """Return this micro-batch's share of the mean of ``values`` (n,) over the whole step. Dummy
    rows are not ``valid``."""
    return step_loss(values[:, None], valid[:, None], counts, "seq-mean-token-sum")


def _reward_metrics(rewards: Tensor, batch: PreferenceBatch, paired: bool) -> dict[str, Metric]:
    """Return the mean rewards of the better and the worse answers from ``rewards`` (b,). For pairs,
    add how often and by how much the better answer leads."""
    metrics: dict[str, Metric] = {}
    for name, passed in (("rewards/chosen", 1), ("rewards/rejected", 0)):
        metrics |= masked_metrics({name: rewards}, batch.valid & (batch.passed == passed))
    if paired:
        chosen, rejected = split_pairs(rewards)
        columns = {"accuracy": chosen > rejected, "rewards/margin": chosen - rejected}
        metrics |= masked_metrics(columns, split_pairs(batch.valid)[0])
    return metrics
