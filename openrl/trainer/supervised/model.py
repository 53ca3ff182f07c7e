"""The model of a supervised run, over all its ranks, and what a task does with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrl.algorithms.batching import TrainingPlan
from openrl.algorithms.masked import masked_sum
from openrl.algorithms.row_sizes import RowSizes
from openrl.cluster.group import RankGroup, data_ranks
from openrl.data.preference import PreferenceExample, add_ref_logprobs
from openrl.experience import TokenBatch
from openrl.metrics import merge_all, to_floats
from openrl.tracking.progress import Tell
from openrl.trainer.learning.dropping import DropPoint, StepDropped
from openrl.trainer.learning.nonfinite import NonFiniteMonitor
from openrl.trainer.learning.rows import (
    BatchingSpec,
    evaluate_rows,
    forward_outputs,
    forward_rows,
    shards_of,
    update_rows,
    work_metrics,
)
from openrl.trainer.supervised.tasks import Examples, Task
from openrl.training_engine.build import ModelSpec
from openrl.training_engine.state import StateParts

TEACHER = 1  # number of the teacher among the models of a worker
CHUNK = 1024  # examples per batch where no optimizer step determines the number
# training examples whose rewards are measured if there are no evaluation examples
STATISTICS = 1000


class SupervisedModel:
    """One model on a group of ranks. The group must have been started, except for
    ``add_reference``, which starts it with another model."""

    def __init__(
        self,
        group: RankGroup,
        task: Task,
        pad_id: int,
        spec: BatchingSpec,
        monitor: NonFiniteMonitor,
    ) -> None:
        self.group, self.task, self.pad_id = group, task, pad_id
        self.batching, self.monitor = spec, monitor

    async def forward(self, batch: TokenBatch) -> Tensor:
        """Return the model's output for all rows."""
        return await forward_rows(self.group, batch, self.batching)

    async def update(self, batch: TokenBatch, step: int, point: DropPoint) -> dict[str, float]:
        """Take one optimizer step over the batch and return its metrics. Raises StepDropped if the
        run is asked to stop before it."""
        batch, plan = await self._planned(batch)
        shards = shards_of(batch, plan, self.task.update)
        try:
            reports = await update_rows(self.group, point, shards)
        except StepDropped:
            await self.group.call("drop_update")
            raise
        self.monitor.check("model", step, batch, plan, reports)
        metrics = merge_all(report for rank in reports for report in rank)
        return to_floats(
            metrics | work_metrics(RowSizes.of(batch, self.batching.cost), plan, self.batching)
        )

    async def evaluate(
        self, examples: Sequence[Any], tell: Tell, stops: Callable[[], Awaitable[bool]]
    ) -> dict[str, float] | None:
        """Return the task's metrics over all examples, under eval/; None if ``stops`` says that
        the run is asked to stop meanwhile."""
        parts = []
        for batch in self._batches(examples, tell):
            if await stops():
                return None
            batch, plan = await self._planned(batch)
            parts.append(await evaluate_rows(self.group, batch, plan, self.task.update))
        values = to_floats(merge_all(parts))
        return {
            f"eval/{name}": value
            for name, value in (values | self.task.from_evaluation(values)).items()
        }

    async def _planned(self, batch: TokenBatch) -> tuple[TokenBatch, TrainingPlan]:
        """Return the batch with all columns that the task needs, and the plan of a single step."""
        batch, spec = await self.task.prepare_batch(batch, self.forward), self.batching
        if self.task.teacher is not None:
            found = await forward_outputs(self.group, batch, spec, TEACHER, "teacher")
            found.pop("output")
            batch = batch.replace(**found)
        return batch, self.task.plan(batch, data_ranks(self.group), spec.train, spec.cost)

    async def add_reference(
        self, spec: ModelSpec, examples: Sequence[PreferenceExample], tell: Tell
    ) -> list[PreferenceExample]:
        """Return the examples with the log-probs of a frozen model, run before the trained one."""
        sums = []
        await self.group.call("start", spec)
        for batch in self._batches(examples, tell):
            sums.append(masked_sum(await self.forward(batch), batch.loss_mask, -1))
        return add_ref_logprobs(examples, torch.cat(sums))

    async def save(self, directory: Path, parts: StateParts) -> None:
        await self.group.call("save", str(directory / "model"), parts)

    async def load(self, directory: Path, parts: StateParts) -> None:
        await self.group.call("load", str(directory / "model"), parts)

    async def export(self, directory: Path, examples: Examples) -> None:
        """Write a Hugging Face directory. The fields that the task adds to config.json are measured
        on the evaluation examples or, without any, on the first training examples."""
        fields: dict[str, float] = {}
        if self.task.config_fields is not None:
            measured = examples.evaluation or examples.train[:STATISTICS]
            outputs = [await self.forward(batch) for batch in self._batches(measured)]
            fields = self.task.config_fields(torch.cat(outputs))
        await self.group.call("export", str(directory), fields)

    def _batches(
        self, examples: Sequence[Any], tell: Tell = lambda done, total: None
    ) -> Iterator[TokenBatch]:
        for start in range(0, len(examples), CHUNK):
            tell(start, len(examples))
            yield self.task.collate(examples[start : start + CHUNK], self.pad_id)
