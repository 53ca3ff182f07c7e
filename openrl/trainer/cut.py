"""How a run cuts rows into micro-batches, and what a cut costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openrl.algorithms.batching import PER_TOKEN, MicroBatchSize, TokenCap, TrainingPlan
from openrl.algorithms.partition import RowCost
from openrl.config import derived
from openrl.config.commands import PPOConfig, SupervisedConfig
from openrl.tracking.metrics import Mean, Metric


@dataclass(frozen=True)
class Cut:
    """Of training steps and of forward-only passes."""

    train: MicroBatchSize
    forward: MicroBatchSize
    cost: RowCost = PER_TOKEN
    packed: bool = False  # micro-batches run without padding


def rollout_cut(config: PPOConfig, cost: RowCost) -> Cut:
    batch, dynamic, packed = config.batch, config.dynamic, derived.packs(config)
    if not dynamic.use_dynamic_batch:
        return Cut(batch.micro_train_batch_size, batch.micro_rollout_batch_size, cost, packed)
    forward = dynamic.rollout_max_tokens_per_gpu or dynamic.train_max_tokens_per_gpu
    train, forward = (derived.most_tokens(config, n) for n in (dynamic.train_max_tokens_per_gpu, forward))
    return Cut(TokenCap(train), TokenCap(forward), cost, packed)


def supervised_cut(config: SupervisedConfig, cost: RowCost) -> Cut:
    dynamic = config.dynamic
    size: MicroBatchSize = config.batch.micro_train_batch_size
    if dynamic.use_dynamic_batch:
        size = TokenCap(derived.most_tokens(config, dynamic.train_max_tokens_per_gpu))
    return Cut(size, size, cost, derived.packs(config))


def work_metrics(lengths: Sequence[int], plan: TrainingPlan, cut: Cut) -> dict[str, Metric]:
    """Of the plan's optimizer steps over rows of these lengths: padding_waste is the share of computed tokens that nobody
    needs, rank_imbalance the cost of the busiest rank over that of the mean, micro_batches the forward and backward passes
    of each rank."""
    imbalance, needed, computed, passes = Mean(0.0, 0), 0, 0, 0
    for step in plan.steps:
        costs = []
        for shard, of_rank in zip(plan.shards, step, strict=True):
            micro_batches = [[lengths[shard[i]] if i >= 0 else 0 for i in rows] for rows in of_rank.micro_batches]
            needed += sum(map(sum, micro_batches))
            computed += sum(tokens_of(rows, cut.packed) for rows in micro_batches)
            costs.append(sum(cut.cost(n) for rows in micro_batches for n in rows))
        imbalance = imbalance.merge(Mean(max(costs) * len(costs) / max(sum(costs), 1), 1))
        passes += len(step[0].micro_batches)
    return {
        "perf/padding_waste": Mean(computed - needed, computed),
        "perf/rank_imbalance": imbalance,
        "perf/micro_batches": Mean(passes, len(plan.steps)),
    }


def tokens_of(lengths: list[int], packed: bool) -> int:
    """What a micro-batch of rows with these lengths computes; a dummy, of length 0, is one token."""
    real = [max(n, 1) for n in lengths]
    return sum(real) if packed else len(real) * max(real)
