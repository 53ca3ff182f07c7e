"""Rows of a batch over the ranks of a group: how they are cut into micro-batches, a forward pass,
an optimizer step, an evaluation, and what a cut costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from openrl.algorithms.batching import (
    PER_TOKEN,
    MicroBatchSize,
    TokenCap,
    TrainingPlan,
    join_rows,
    split_rows,
)
from openrl.algorithms.partition import RowCost
from openrl.algorithms.row_sizes import DUMMY, RowSizes
from openrl.cluster.group import RankGroup, data_ranks
from openrl.cluster.model_worker import ModelChoice
from openrl.config import derived
from openrl.config.commands import PPOConfig, SupervisedConfig
from openrl.config.learning import RolloutBatchFlags
from openrl.experience import ExperienceBatch, StepPlan
from openrl.models.outputs import Want
from openrl.tracking.metrics import Mean, Metric, merge_all
from openrl.trainer.learning.nonfinite import Reports
from openrl.training.engine import LossOf


@dataclass(frozen=True)
class BatchingSpec:
    """Of training steps and of forward-only passes."""

    train: MicroBatchSize
    forward: MicroBatchSize
    cost: RowCost = PER_TOKEN
    packed: bool = False  # micro-batches run without padding


def rollout_batching(config: PPOConfig, cost: RowCost) -> BatchingSpec:
    batch, dynamic, packed = config.batch, config.dynamic, derived.packs(config)
    cost = replace(cost, shared=derived.shares_prefixes(config))
    if not dynamic.use_dynamic_batch:
        return BatchingSpec(
            batch.micro_train_batch_size, batch.micro_rollout_batch_size, cost, packed
        )
    forward = dynamic.rollout_max_tokens_per_gpu or dynamic.train_max_tokens_per_gpu
    train, forward = (
        derived.most_tokens(config, n) for n in (dynamic.train_max_tokens_per_gpu, forward)
    )
    return BatchingSpec(TokenCap(train), TokenCap(forward), cost, packed)


def supervised_batching(config: SupervisedConfig, cost: RowCost) -> BatchingSpec:
    dynamic, cost = config.dynamic, replace(cost, shared=derived.shares_prefixes(config))
    size: MicroBatchSize = config.batch.micro_train_batch_size
    if dynamic.use_dynamic_batch:
        size = TokenCap(derived.most_tokens(config, dynamic.train_max_tokens_per_gpu))
    return BatchingSpec(size, size, cost, derived.packs(config))


def step_size(flags: RolloutBatchFlags, trajectories: int) -> int:
    """Trajectories of an optimizer step: --train_batch_size, or more where several agents play each
    episode, so that a rollout has the steps that the learning rate counts on."""
    planned = -(-derived.samples_per_step(flags) // flags.train_batch_size)
    return max(flags.train_batch_size, -(-trajectories // planned))


# -- passes over rows ------------------------------------------------------------------------------


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


# -- what a cut costs ------------------------------------------------------------------------------


def work_metrics(sizes: RowSizes, plan: TrainingPlan, spec: BatchingSpec) -> dict[str, Metric]:
    """Of the plan's optimizer steps over these rows: padding_waste is the share of computed tokens
    that nobody needs, rank_imbalance the cost of the busiest rank over that of the mean,
    micro_batches the forward and backward passes of each rank; shared_tokens, where siblings share
    what they begin with, the share of the rows' tokens that this spares."""
    imbalance, whole, needed, computed, passes = Mean(0.0, 0), 0, 0, 0, 0
    for step in plan.steps:
        costs = []
        for shard, of_rank in zip(plan.shards, step, strict=True):
            micro_batches = [
                [shard[i] if i != DUMMY else DUMMY for i in rows] for rows in of_rank.micro_batches
            ]
            for rows in micro_batches:
                lengths = [sizes.lengths[row] for row in rows if row != DUMMY]
                tokens = sizes.tokens(rows)
                whole += sum(lengths)
                needed += tokens - rows.count(DUMMY)
                computed += tokens if spec.packed else len(rows) * max(lengths, default=1)
            costs.append(sum(sizes.costs(rows) for rows in micro_batches))
        if any(costs):  # else no row has a gradient
            imbalance = imbalance.merge(Mean(max(costs) * len(costs) / sum(costs), 1))
        passes += len(step[0].micro_batches)
    spared: dict[str, Metric] = (
        {} if sizes.groups is None else {"perf/shared_tokens": Mean(whole - needed, whole)}
    )
    return spared | {
        "perf/padding_waste": Mean(computed - needed, computed),
        "perf/rank_imbalance": imbalance,
        "perf/micro_batches": Mean(passes, len(plan.steps)),
    }


def left_out_metrics(batch: ExperienceBatch, computed: Tensor) -> dict[str, Metric]:
    """Of a policy's update that computes the rows ``computed`` (B,) bool: the share of rows left
    out, and the share of the trained tokens that the update's figures are measured on."""
    tokens = batch.response_lengths
    return {
        "perf/rows_left_out": Mean(int((~computed).sum()), len(computed)),
        "actor/measured_share": Mean(int(tokens[computed].sum()), int(tokens.sum())),
    }
