"""What a training engine is: one rank's share of a model that is trained or only evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from openrl.config.rollout import SleepState
from openrl.experience import ExperienceBatch, ParallelLayout, StepCounts, StepPlan
from openrl.models.outputs import Want
from openrl.tracking.metrics import Metric
from openrl.training.state import WHOLE, StateParts


class Forward(Protocol):
    """The model on one micro-batch, with gradient: its column, and by name what else is asked
    for."""

    def __call__(self, batch: ExperienceBatch, *want: Want) -> tuple[Tensor, dict[str, Tensor]]: ...


LossOf = Callable[[Forward, ExperienceBatch, StepCounts], tuple[Tensor, dict[str, Metric]]]
"""``loss_of(forward, micro_batch, counts) -> (loss, metrics)``: the loss of one micro-batch,
divided by the counts of the whole optimizer step and multiplied by dp_size, so that gradients
summed over micro-batches and averaged over ranks are those of the whole step."""


@dataclass(frozen=True)
class StepPart:
    """Rows of one rank's shard that are trained in an optimizer step, by a loss with counts of its
    own."""

    batch: ExperienceBatch
    plan: StepPlan
    loss_of: LossOf


class TrainEngine(Protocol):
    """Every rank calls every method in the same order: collectives hide inside."""

    layout: ParallelLayout

    def sleep(self, *parts: SleepState) -> None:
        """Free the device's memory of these parts. What needs one of them raises RuntimeError until
        it is woken."""

    def wake(self, *parts: SleepState) -> None:
        """Bring these parts back as they were. RuntimeError if one is awake already."""

    def forward(
        self, batch: ExperienceBatch, micro_batches: list[list[int]], at_start: bool = False
    ) -> Tensor:
        """The model's column for all rows of the shard, without gradient: (B, T) log-probs or
        values, or (B,) rewards, by the kind of model. Fp32, on the CPU; 0 on tokens that are not
        trained, and in rows left out. ``at_start``: of the model as it was before its adapters were
        trained."""

    def columns(
        self,
        batch: ExperienceBatch,
        micro_batches: list[list[int]],
        *want: Want,
        at_start: bool = False,
    ) -> dict[str, Tensor]:
        """``forward``'s column under the name "column", and what else is asked for, each by its own
        name, (B, T, ...)."""

    def train_step(
        self, batch: ExperienceBatch, plan: StepPlan, loss_of: LossOf, also: StepPart | None = None
    ) -> dict[str, Metric]:
        """Forward and backward over the plan's micro-batches, then over those of ``also``, one
        optimizer step on the sum of their gradients. Metrics of this rank: those of the losses,
        ``grad_norm`` before clipping, ``lr``, ``nonfinite_steps`` (a gradient with inf or NaN skips
        the step and leaves weights, optimizer and schedule as they were; in fp16 it counts as
        ``loss_scale_skips`` as long as the loss scale can still fall)."""

    def evaluate(
        self, batch: ExperienceBatch, plan: StepPlan, loss_of: LossOf
    ) -> dict[str, Metric]:
        """The metrics of ``loss_of`` on the plan's micro-batches, without gradient and step."""

    def named_weights(self, without_tower: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Full weights under the names that ``save_pretrained`` writes, in the type of the
        parameters; tied weights once. Gathered layer by layer: every rank iterates to the end, each
        gets the tensors. ``without_tower`` leaves out those of a vision tower."""

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters and every other trained parameter, whole, under the names in peft's files;
        every rank gets the tensors."""

    def adapter_config(self) -> dict[str, Any]:
        """What peft writes into adapter_config.json beside those."""

    def nonfinite_weights(self) -> list[str]:
        """Names of the parameters that hold inf or NaN on any rank; each rank looks at its own
        share."""

    def parameter_count(self) -> int:
        """Parameters of the whole model, shards of other ranks included."""

    def save(self, directory: Path, parts: StateParts = WHOLE) -> None:
        """Weights, their moving average, optimizer, schedule and random state of every rank, to
        resume bit for bit."""

    def load(self, directory: Path, parts: StateParts = WHOLE) -> None:
        """Take up a saved state. Raises UserError if ranks, ZeRO stage or type differ from those
        that saved it, or if one of ``parts`` was not saved."""

    def export(self, directory: Path, config_fields: Mapping[str, Any] | None = None) -> None:
        """A Hugging Face model directory in safetensors, written by rank 0; no tokenizer.
        ``config_fields`` are added to its config.json. Holds the moving average of the weights,
        where there is one."""
