"""Rows of a batch over the ranks of a group: a forward pass, an optimizer step, an evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from openrl.algorithms.batching import TrainingPlan, join_rows, split_rows
from openrl.algorithms.row_sizes import RowSizes
from openrl.cluster.group import RankGroup, data_ranks
from openrl.cluster.model_worker import ModelChoice
from openrl.experience import ExperienceBatch, StepPlan
from openrl.models.outputs import Want
from openrl.tracking.metrics import Metric, merge_all
from openrl.trainer.batching import BatchingSpec
from openrl.trainer.nonfinite import Reports
from openrl.training.engine import LossOf


async def forward_rows(
    group: RankGroup, batch: ExperienceBatch, spec: BatchingSpec, model: int = 0
) -> Tensor:
    """One forward-only pass over all rows: the column of the group's model, (B, T) or (B,), in
    batch order."""
    return (await columns_of_rows(group, batch, spec, model))["column"]


async def columns_of_rows(
    group: RankGroup,
    batch: ExperienceBatch,
    spec: BatchingSpec,
    model: ModelChoice,
    *want: Want,
    scored: Tensor | None = None,
) -> dict[str, Tensor]:
    """``forward_rows``'s column as "column", and what else is asked for, each under its own name,
    (B, T, ...); 0 in rows outside ``scored`` (B,) bool, which are not computed."""
    rows = None if scored is None else scored.nonzero()[:, 0].tolist()
    split = split_rows(RowSizes.of(batch, spec.cost), data_ranks(group), spec.forward, rows)
    ranks = zip(split.shards, split.micro_batches, strict=True)
    parts = await group.scatter(
        "columns", [(batch.select(rows), micro, model, *want) for rows, micro in ranks]
    )
    shape = batch.loss_mask.shape
    return {
        name: join_rows(split.shards, [part[name] for part in parts], shape) for name in parts[0]
    }


@dataclass(frozen=True)
class Training:
    """Rows, who trains which of them when, and by which loss."""

    batch: ExperienceBatch
    plan: TrainingPlan
    loss_of: LossOf

    def of(self, rank: int) -> tuple[ExperienceBatch, list[StepPlan], LossOf]:
        return (
            self.batch.select(self.plan.shards[rank]),
            [ranks[rank] for ranks in self.plan.steps],
            self.loss_of,
        )


async def update_rows(
    group: RankGroup,
    batch: ExperienceBatch,
    plan: TrainingPlan,
    loss_of: LossOf,
    also: Training | None = None,
) -> Reports:
    """Every optimizer step of the plan; metrics by rank and step. The steps of ``also`` are made
    together with these."""
    main = Training(batch, plan, loss_of)
    ranks = range(len(plan.shards))
    return await group.scatter(
        "update", [(*main.of(r), *([also.of(r)] if also else [])) for r in ranks]
    )


async def evaluate_rows(
    group: RankGroup, batch: ExperienceBatch, plan: TrainingPlan, loss_of: LossOf
) -> dict[str, Metric]:
    """The metrics of a loss over all rows; ``plan`` has one step, which is not made."""
    work = [
        (batch.select(rows), plan.steps[0][rank], loss_of) for rank, rows in enumerate(plan.shards)
    ]
    return merge_all(await group.scatter("evaluate", work))
