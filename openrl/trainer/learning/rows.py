"""Work on the rows of a batch, distributed over the ranks of a group: micro-batches, forward
passes, optimizer steps, evaluations, and metrics of what the distribution costs."""

from __future__ import annotations

import time
from collections.abc import Mapping
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
from openrl.algorithms.privileged import PrivilegedRows
from openrl.algorithms.row_sizes import DUMMY, RowSizes
from openrl.cluster.group import RankGroup, WorkerGroup, data_ranks
from openrl.config import derived
from openrl.config.commands import PPOConfig, SupervisedConfig
from openrl.config.groups.batch import RolloutBatchFlags
from openrl.experience import TokenBatch
from openrl.metrics import Mean, Metric, merge_all
from openrl.models.logits import Output
from openrl.trainer.learning.dropping import DropPoint, next_count
from openrl.trainer.learning.nonfinite import Reports
from openrl.training_engine.updates import LossOf, Shard
from openrl.workers.model_worker import ModelChoice


@dataclass(frozen=True)
class BatchingSpec:
    """How rows become micro-batches, in training steps and in forward-only passes."""

    train: MicroBatchSize
    forward: MicroBatchSize
    cost: RowCost = PER_TOKEN
    packed: bool = False  # run micro-batches without padding


def rollout_batching(config: PPOConfig, cost: RowCost) -> BatchingSpec:
    batch, dynamic, packed = config.batch, config.dynamic, derived.packs(config)
    cost = replace(cost, shared=config.packing.shares_prefixes)
    if not dynamic.use_dynamic_batch:
        train, forward = batch.micro_train_batch_size, batch.micro_rollout_batch_size
        return BatchingSpec(train, forward, cost, packed)
    train = dynamic.train_max_tokens_per_gpu
    forward = dynamic.rollout_max_tokens_per_gpu or train
    # ranks that split sequences hold a micro-batch together
    split = config.parallel.sequence_size
    return BatchingSpec(TokenCap(train * split), TokenCap(forward * split), cost, packed)


def supervised_batching(config: SupervisedConfig, cost: RowCost) -> BatchingSpec:
    dynamic, cost = config.dynamic, replace(cost, shared=config.packing.shares_prefixes)
    size: MicroBatchSize = config.batch.micro_train_batch_size
    if dynamic.use_dynamic_batch:
        size = TokenCap(dynamic.train_max_tokens_per_gpu * config.parallel.sequence_size)
    return BatchingSpec(size, size, cost, derived.packs(config))


def step_size(flags: RolloutBatchFlags, trajectories: int) -> int:
    """Return the number of trajectories in an optimizer step: --train_batch_size, or more if
    several agents play each episode or earlier groups are replayed, so that the learning-rate
    schedule's count of steps holds."""
    planned = -(-flags.samples_per_step // flags.train_batch_size)
    return max(flags.train_batch_size, -(-trajectories // planned))


@dataclass(frozen=True)
class ForwardRequest:
    """A forward pass of a model, whose output fills the field ``name`` of the batch."""

    name: str
    group: WorkerGroup | None  # None: the run has no such model
    model: ModelChoice = 0
    also: tuple[Output, ...] = ()  # further outputs, under their own names
    rows: Tensor | None = None  # (B,) bool, rows that need the output; None: all
    # the rows as the model reads them; None: as they are
    reads: PrivilegedRows | None = None


# -- passes over rows ------------------------------------------------------------------------------


async def forward_rows(
    group: RankGroup, batch: TokenBatch, spec: BatchingSpec, model: int = 0
) -> Tensor:
    """Run a forward-only pass over all rows. Returns the model's output, (B, T) or (B,)."""
    return (await forward_outputs(group, batch, spec, model))["output"]


async def forward_outputs(
    group: RankGroup,
    batch: TokenBatch,
    spec: BatchingSpec,
    model: ModelChoice,
    *outputs: Output,
    only: Tensor | None = None,
    point: DropPoint | None = None,
) -> dict[str, Tensor]:
    """Run a forward-only pass. Returns the result of ``forward_rows`` as "output" and the further
    outputs, (B, T, ...), under their own names. Rows outside ``only`` (B,) bool are not
    computed and hold 0.

    With ``point`` the ranks work in pieces of a few micro-batches, and StepDropped is raised if the
    run is asked to stop before one."""
    rows = None if only is None else only.nonzero()[:, 0].tolist()
    sizes = RowSizes.of(batch, spec.cost)
    shards, micro_batches = split_rows(sizes, data_ranks(group), spec.forward, rows)
    total = len(micro_batches[0])
    done, count = 0, 1 if point else total
    pieces: list[list[int]] = []
    parts: list[dict[str, Tensor]] = []
    while done < total:
        if point:
            await point.check()
        cut = [
            piece_of(shard, of_rank[done : done + count])
            for shard, of_rank in zip(shards, micro_batches, strict=True)
        ]
        work = [(batch.select(piece), micro, model, *outputs) for piece, micro in cut]
        started = time.monotonic()
        parts += await group.scatter("forward", work)
        pieces += [piece for piece, _ in cut]
        done, count = done + count, next_count(count, time.monotonic() - started)
    by_name = {name: [part[name] for part in parts] for name in parts[0]}
    shape = batch.loss_mask.shape
    return {name: join_rows(pieces, of_ranks, shape) for name, of_ranks in by_name.items()}


def piece_of(shard: list[int], micro_batches: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Return the rows of a shard that some of its micro-batches hold, [-1] if none, and these
    micro-batches with indices into them."""
    used = sorted({row for rows in micro_batches for row in rows if row != DUMMY})
    place = {row: n for n, row in enumerate(used)} | {DUMMY: DUMMY}
    return [shard[row] for row in used] or [DUMMY], [[place[r] for r in m] for m in micro_batches]


def shards_of(batch: TokenBatch, plan: TrainingPlan, loss_of: LossOf) -> list[Shard]:
    """Return what each rank trains of a batch."""
    return [
        (batch.select(rows), [ranks[rank] for ranks in plan.steps], loss_of)
        for rank, rows in enumerate(plan.shards)
    ]


async def update_rows(group: RankGroup, point: DropPoint, *parts: list[Shard]) -> Reports:
    """Take all optimizer steps and return metrics by rank and step. Each of ``parts`` is what the
    ranks train of one batch; each step trains on the corresponding step of every part.

    Raises StepDropped if the run is asked to stop before ``point``. Until then the ranks work in
    pieces of a few micro-batches, afterwards in one."""
    of_rank_0 = [plans for _, plans, _ in (shards[0] for shards in parts)]
    sizes = [sum(len(p.micro_batches) for p in step) for step in zip(*of_rank_0, strict=True)]
    await group.scatter("begin_update", [*zip(*parts, strict=True)])
    reports: list[list[Mapping[str, Metric]]] = [[] for _ in range(data_ranks(group))]
    done, count = 0, 1
    while done < sum(sizes):
        await point.check()
        if done + count >= sizes[0]:
            point.passes()
        if point.passed:
            count = sum(sizes) - done
        started = time.monotonic()
        answers = await group.call("advance", count)
        for of_rank, metrics in zip(reports, answers[:: group.ranks_per_shard], strict=True):
            of_rank += metrics
        done, count = done + count, next_count(count, time.monotonic() - started)
    return reports


async def evaluate_rows(
    group: RankGroup, batch: TokenBatch, plan: TrainingPlan, loss_of: LossOf
) -> dict[str, Metric]:
    """Return the metrics of a loss over all rows. ``plan`` has a single step; it only distributes
    the rows, and no optimizer step is taken."""
    ranks = zip(plan.shards, plan.steps[0], strict=True)
    work = [(batch.select(rows), of_rank, loss_of) for rows, of_rank in ranks]
    return merge_all(await group.scatter("evaluate", work))


# -- what a cut costs ------------------------------------------------------------------------------


def work_metrics(sizes: RowSizes, plan: TrainingPlan, spec: BatchingSpec) -> dict[str, Metric]:
    """Return metrics of the plan's optimizer steps over these rows: padding_waste is the share of
    computed tokens that nobody needs, rank_imbalance the cost of the busiest rank relative to the
    mean, and micro_batches the number of forward and backward passes of each rank. If siblings
    share their prefixes, shared_tokens is the share of the rows' tokens that this saves."""
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
        if any(costs):  # all are 0 if no row has a gradient
            imbalance = imbalance.merge(Mean(max(costs) * len(costs) / sum(costs), 1))
        passes += len(step[0].micro_batches)
    metrics: dict[str, Metric] = {
        "perf/padding_waste": Mean(computed - needed, computed),
        "perf/rank_imbalance": imbalance,
        "perf/micro_batches": Mean(passes, len(plan.steps)),
    }
    if sizes.groups is not None:
        metrics["perf/shared_tokens"] = Mean(whole - needed, whole)
    return metrics


def zero_gradient_metrics(batch: TokenBatch, computed: Tensor) -> dict[str, Metric]:
    """Return metrics of a policy update that computes only the rows ``computed`` (B,) bool: the
    share of rows left out, and the share of trained tokens on which metrics are measured."""
    tokens = batch.response_lengths
    return {
        "perf/rows_left_out": Mean(int((~computed).sum()), len(computed)),
        "actor/measured_share": Mean(int(tokens[computed].sum()), int(tokens.sum())),
    }
