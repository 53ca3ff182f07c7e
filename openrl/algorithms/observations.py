"""What somebody else said in an episode, which an auxiliary loss may learn to predict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from openrl.algorithms.masked import step_loss
from openrl.experience import ExperienceBatch, StepCounts

if TYPE_CHECKING:
    from torch import Tensor


def mark_observed(batch: ExperienceBatch) -> ExperienceBatch:
    """Mark what environments, tools and users wrote after the first sampled token of each row, with
    the marks of the chat template around it. A prompt is no observation, nor is what stands before
    the first sampled token of a later row. Rows that are not trained have none."""
    begun = batch.loss_mask.cumsum(-1) > 0
    return batch.replace(observed=begun & ~batch.loss_mask & batch.attention_mask)


def observation_loss(logprobs: Tensor, batch: Any, counts: StepCounts) -> Tensor:
    """Return this micro-batch's share of the mean negative log-likelihood of all observed tokens of
    the step; ``logprobs`` are (b, T)."""
    of_observed = StepCounts(counts.observed, counts.trajectories, counts.dp_size)
    return step_loss(-logprobs, batch.observed, of_observed, "token-mean")
