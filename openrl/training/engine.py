"""What a training engine is: one rank's share of a model that is trained or only evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from openrl.types import ExperienceBatch, ParallelLayout, StepPlan

LossOf = Callable[[Any, ExperienceBatch], tuple[Tensor, dict[str, Any]]]
"""``loss_of(forward, micro_batch) -> (loss, metrics)``: the loss of one micro-batch, already divided by
the counts of the whole optimizer step; ``forward(micro_batch)`` gives the model's (b, T) column."""


class TrainEngine(Protocol):
    """Every rank calls every method: collectives hide inside."""

    layout: ParallelLayout

    def forward(self, batch: ExperienceBatch, micro_batches: list[list[int]]) -> Tensor:
        """The model's column for all rows of the shard, without gradient: (B, T) log-probs or values, or
        (B,) rewards, by the kind of model. Fp32, on the CPU."""

    def train_step(self, batch: ExperienceBatch, plan: StepPlan, loss_of: LossOf) -> dict[str, Any]:
        """Forward and backward over the plan's micro-batches, one optimizer step. Metrics of this rank."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full weights under their checkpoint names, one at a time; every rank iterates, rank 0 uses them."""

    def save(self, directory: Path) -> None:
        """Weights, optimizer, schedule and random state of every rank, to resume bit for bit."""

    def load(self, directory: Path) -> None: ...

    def export(self, directory: Path) -> None:
        """A Hugging Face model directory in safetensors."""
