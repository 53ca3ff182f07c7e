"""The interface of a training engine: one rank's share of a model that is trained or only
evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from openrl.config.groups.placement import SleepState
from openrl.experience import ExperienceBatch, ParallelLayout, StepCounts, StepPlan
from openrl.models.logits import Output
from openrl.tracking.metrics import Metric
from openrl.training.state import WHOLE, StateParts


class Forward(Protocol):
    """Runs the model on one micro-batch with gradient. Returns its column, and further outputs by
    name."""

    def __call__(
        self, batch: ExperienceBatch, *outputs: Output
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


LossOf = Callable[[Forward, ExperienceBatch, StepCounts], tuple[Tensor, dict[str, Metric]]]
"""``loss_of(forward, micro_batch, counts) -> (loss, metrics)`` computes the loss of one
micro-batch, divided by the counts of the whole optimizer step and multiplied by dp_size. So the
gradients, summed over micro-batches and averaged over ranks, are those of the whole step."""


@dataclass(frozen=True)
class StepPart:
    """The part of an optimizer step that one loss trains: rows of the rank's shard, with their own
    plan and counts."""

    batch: ExperienceBatch
    plan: StepPlan
    loss_of: LossOf


class TrainEngine(Protocol):
    """One rank's share of a model. All ranks must call the same methods in the same order, since
    the methods run collectives."""

    layout: ParallelLayout

    def sleep(self, *parts: SleepState) -> None:
        """Free the device memory of these parts. Methods that need one of them raise RuntimeError
        until it is woken."""

    def wake(self, *parts: SleepState) -> None:
        """Restore these parts bit for bit. Raises RuntimeError if one is already awake."""

    def columns(
        self,
        batch: ExperienceBatch,
        micro_batches: list[list[int]],
        *outputs: Output,
        as_reference: bool = False,
    ) -> dict[str, Tensor]:
        """Run all rows of the shard without gradient.

        Returns the model's "column", which holds log-probs or values (B, T), or rewards (B,),
        depending on the kind of model, and the further outputs, each (B, T, ...) under its own
        name. All are on the CPU, and 0 on tokens that are not trained and in rows that no
        micro-batch holds; the column is fp32. With ``as_reference`` the model runs as it was before
        its adapters were trained."""

    def train_step(
        self, batch: ExperienceBatch, plan: StepPlan, loss_of: LossOf, also: StepPart | None = None
    ) -> dict[str, Metric]:
        """Run forward and backward over the plan's micro-batches, then over those of ``also``, and
        take one optimizer step on the sum of their gradients.

        Returns this rank's metrics: those of the losses, ``grad_norm`` before clipping, ``lr`` and
        ``nonfinite_steps``. A gradient with inf or NaN skips the step and leaves weights, optimizer
        and schedule unchanged. In fp16, such a step counts as ``loss_scale_skips`` instead as long
        as the loss scale can still fall."""

    def evaluate(
        self, batch: ExperienceBatch, plan: StepPlan, loss_of: LossOf
    ) -> dict[str, Metric]:
        """Return the metrics of ``loss_of`` on the plan's micro-batches, without gradient or
        step."""

    def named_weights(self, without_tower: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights under the names that ``save_pretrained`` writes, in the type of
        the parameters, and tied weights once. They are gathered layer by layer: every rank gets
        the tensors and must iterate to the end. ``without_tower`` leaves out the vision tower."""

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters and every other trained parameter, whole, under the names of peft's
        files. Every rank gets the tensors."""

    def adapter_config(self) -> dict[str, Any]:
        """Return what peft writes into adapter_config.json next to the adapters."""

    def nonfinite_weights(self) -> list[str]:
        """Return the names of parameters that hold inf or NaN on any rank. Each rank checks its own
        share."""

    def parameter_count(self) -> int:
        """Return the number of parameters of the whole model, across all ranks."""

    def save(self, directory: Path, parts: StateParts = WHOLE) -> None:
        """Save everything that a bit-for-bit resume needs: every rank's weights, their moving
        average, optimizer, schedule and random state."""

    def load(self, directory: Path, parts: StateParts = WHOLE) -> None:
        """Resume from a saved state. Raises UserError if the number of ranks, the ZeRO stage or the
        type differs from the saved run's, or if one of ``parts`` was not saved."""

    def export(self, directory: Path, config_fields: Mapping[str, Any] | None = None) -> None:
        """Write a Hugging Face model directory in safetensors, on rank 0, without a tokenizer.
        ``config_fields`` are added to its config.json. If there is a moving average of the weights,
        that is what is exported."""
