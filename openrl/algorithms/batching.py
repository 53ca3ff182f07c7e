"""Planning: which rank trains which rows, in which optimizer step and micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import torch
from torch import Tensor

from openrl.algorithms.partition import RowCost, balanced_parts
from openrl.algorithms.row_sizes import DUMMY, RowSizes
from openrl.algorithms.trajectories import Trajectories
from openrl.errors import UserError
from openrl.experience import StepCounts, StepPlan, TokenBatch


@dataclass(frozen=True)
class TokenCap:
    """As many rows per micro-batch as fit into ``tokens`` tokens on a rank, without padding."""

    tokens: int


MicroBatchSize = int | TokenCap
"""Rows of a micro-batch on one rank, or a cap on its tokens."""

PER_TOKEN = RowCost()


@dataclass(frozen=True)
class TrainingPlan:
    """Who trains what, and when, in one or several passes over a rollout batch."""

    # [rank]: the rows of the batch that the rank trains in any step; [-1] if it has none (for
    # pairs: [-1, -1])
    shards: list[list[int]]
    steps: list[list[StepPlan]]  # [optimizer step][rank]; micro-batches index into the rank's shard


def plan_steps(
    batch: TokenBatch,
    dp_size: int,
    train_batch_size: int,
    micro_batch_size: MicroBatchSize,
    epochs: int = 1,
    generator: torch.Generator | None = None,
    cost: RowCost = PER_TOKEN,
    computed: Tensor | None = None,
) -> TrainingPlan:
    """Cut a rollout batch into optimizer steps of ``train_batch_size`` trajectories; the last step
    of an epoch may be smaller. All rows of a trajectory lie in the same step.

    Every epoch shuffles all trajectories anew with ``generator`` (None keeps their order) and
    trains each exactly once. Which trajectories share a step depends neither on their rows nor on
    ``dp_size`` and ``micro_batch_size``. Within a step, rows are dealt to ranks by ``cost``
    (Karmarkar-Karp): ranks get equal numbers of rows if micro-batches count rows, and any number if
    they count tokens. If siblings share a prefix (``cost.shared``), they stay together.

    A rank receives each row that it trains in any step once; every epoch deals anew.

    All ranks run the same number of micro-batches, the costliest first; a rank that runs out of
    rows runs ``[-1]``, a dummy row. Raises UserError for a row beyond a ``TokenCap``.

    Rows outside ``computed`` (B,) bool go to no rank, but keep their places and are counted.
    """
    sizes, index = RowSizes.of(batch, cost), Trajectories.of(batch).index.tolist()
    rows_of: dict[int, list[int]] = {}
    for row, trajectory in enumerate(index):
        rows_of.setdefault(trajectory, []).append(row)
    rows_of_steps = []
    for _ in range(epochs):
        order = list(rows_of)
        if generator is not None:
            order = [order[i] for i in torch.randperm(len(order), generator=generator).tolist()]
        for start in range(0, len(order), train_batch_size):
            of_step = order[start : start + train_batch_size]
            rows_of_steps.append([row for trajectory in of_step for row in rows_of[trajectory]])
    runs = [True] * len(index) if computed is None else computed.tolist()
    dealt = [[row for row in rows if runs[row]] for rows in rows_of_steps]
    shards, cuts = _indexed(
        [_cut(rows, sizes, dp_size, micro_batch_size) for rows in dealt], dp_size
    )
    tokens, steps = batch.response_lengths.tolist(), []
    for rows, cut in zip(rows_of_steps, cuts, strict=True):
        trained = {index[row] for row in rows if tokens[row]}
        skipped = sum(tokens[row] for row in rows if not runs[row])
        whole = sum(tokens[row] for row in rows)
        read = [row for row in rows if runs[row]]  # a row that is left out adds nothing to the loss
        observed = 0 if batch.observed is None else int(batch.observed[read].sum())
        counts = StepCounts(whole, len(trained), dp_size, skipped, observed)
        steps.append([StepPlan(micro, counts) for micro in cut])
    return TrainingPlan(shards, steps)


def plan_pairs(
    batch: TokenBatch,
    dp_size: int,
    micro_batch_size: MicroBatchSize,
    cost: RowCost = PER_TOKEN,
) -> TrainingPlan:
    """Plan one optimizer step over a batch in which rows 2p and 2p + 1 are pair p. Sizes count
    pairs, which are never split.

    ``StepCounts.trajectories`` counts pairs with a trained token in the first row, ``tokens`` the
    trained tokens of both rows.
    """
    sizes = RowSizes.of(batch, cost)
    pairs = [Bundle.of((row, row + 1), sizes) for row in range(0, len(batch), 2)]
    shards, (cut,) = _indexed(
        [_dealt(pairs, dp_size, micro_batch_size)], dp_size, nothing=(DUMMY, DUMMY)
    )
    trained = batch.response_lengths
    counts = StepCounts(int(trained.sum()), int((trained[::2] > 0).sum()), dp_size)
    return TrainingPlan(shards, [[StepPlan(micro, counts) for micro in cut]])


@dataclass(frozen=True)
class Bundle:
    """Rows that stay in one micro-batch."""

    rows: tuple[int, ...]
    tokens: int  # that the bundle computes
    cost: float

    @classmethod
    def of(cls, rows: Sequence[int], sizes: RowSizes) -> Self:
        return cls(tuple(rows), sizes.tokens(rows), sizes.costs(rows))


def _cut(
    rows: list[int], sizes: RowSizes, dp_size: int, size: MicroBatchSize
) -> list[list[list[Bundle]]]:
    """Return the bundles of each rank's micro-batches, [rank][micro-batch]. A bundle is one row or,
    where siblings share a prefix, a part of a group that is at most a rank's share of the rows."""
    if sizes.groups is None:
        return _dealt([Bundle.of([row], sizes) for row in rows], dp_size, size)
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(sizes.groups[row], []).append(row)
    share = -(-len(rows) // dp_size)
    if isinstance(size, TokenCap):
        parts = [_parts(group, sizes, share, size.tokens) for group in groups.values()]
        return _dealt(list(chain.from_iterable(parts)), dp_size, size)
    # as many micro-batches, of as many rows, as without sharing, but each of neighbours
    micro = -(-share // -(-share // size)) if rows else size
    order = list(chain.from_iterable(groups.values()))
    starts = range(0, len(order), micro)
    return _dealt([Bundle.of(order[i : i + micro], sizes) for i in starts], dp_size, 1)


def _parts(group: list[int], sizes: RowSizes, limit: int, cap: int) -> list[Bundle]:
    """Cut a group's rows into bundles of at most ``limit`` rows and ``cap`` tokens."""
    parts: list[list[int]] = []
    for row in group:
        if parts and len(parts[-1]) < limit and sizes.tokens([*parts[-1], row]) <= cap:
            parts[-1].append(row)
        else:
            parts.append([row])
    return [Bundle.of(part, sizes) for part in parts]


def _dealt(bundles: list[Bundle], dp_size: int, size: MicroBatchSize) -> list[list[list[Bundle]]]:
    """Return the bundles of each rank's micro-batches, [rank][micro-batch], within ``size``."""
    equal_counts = isinstance(size, int)
    parts = balanced_parts([bundle.cost for bundle in bundles], dp_size, equal_counts)
    ranks = [[bundles[i] for i in part] for part in parts]
    if isinstance(size, TokenCap):
        return _capped(ranks, size.tokens)
    # similar lengths go together, because each micro-batch is padded to its longest row
    falling = [sorted(bundles, key=lambda bundle: -bundle.tokens) for bundles in ranks]
    return [[bundles[i : i + size] for i in range(0, len(bundles), size)] for bundles in falling]


def _indexed(
    steps: list[list[list[list[Bundle]]]], dp_size: int, nothing: tuple[int, ...] = (DUMMY,)
) -> tuple[list[list[int]], list[list[list[list[int]]]]]:
    """Turn bundles, [step][rank][micro-batch], into each rank's shard and,
    [step][rank][micro-batch], indices into the shard.

    In a step all ranks run the same number of micro-batches. A rank that runs out of rows runs
    ``nothing``, which is also the shard of a rank without any row.
    """
    counts = [max(1, *map(len, ranks)) for ranks in steps]
    shards, indexed = [], []
    for rank in range(dp_size):
        mine = [
            [[row for b in micro for row in b.rows] for micro in ranks[rank]] for ranks in steps
        ]
        shard = list(dict.fromkeys(row for cut in mine for rows in cut for row in rows))
        place = {row: i for i, row in enumerate(shard)}
        found = [[[place[row] for row in rows] for rows in cut] for cut in mine]
        missing = [
            [list(nothing)] * (count - len(cut)) for count, cut in zip(counts, found, strict=True)
        ]
        indexed.append([cut + dummies for cut, dummies in zip(found, missing, strict=True)])
        shards.append(shard or list(nothing))
    return shards, [list(ranks) for ranks in zip(*indexed, strict=True)]


def _capped(ranks: list[list[Bundle]], cap: int) -> list[list[list[Bundle]]]:
    """Cut every rank's bundles into as few micro-batches as keep to the cap, the same number on all
    ranks, of similar cost or, where the cap needs it, of similar length."""
    longest = max((bundle.tokens for bundles in ranks for bundle in bundles), default=0)
    if longest > cap:
        raise UserError(
            f"a row of {longest} tokens (a pair: both rows) does not fit into a micro-batch of"
            f" {cap}",
            "a higher --train_max_tokens_per_gpu (--rollout_max_tokens_per_gpu in forward-only"
            " passes), or shorter rows",
        )
    count = max(-(-sum(bundle.tokens for bundle in bundles) // cap) for bundles in ranks)
    while True:
        for balanced in ("cost", "tokens"):
            cut = [_split(bundles, max(count, 1), balanced) for bundles in ranks]
            if all(sum(b.tokens for b in micro) <= cap for micros in cut for micro in micros):
                return cut
        count += 1  # at the latest, each bundle is alone


def _split(bundles: list[Bundle], count: int, balanced: str) -> list[list[Bundle]]:
    """Split a rank's bundles into up to ``count`` parts of similar sums, the costliest first."""
    parts = balanced_parts([getattr(bundle, balanced) for bundle in bundles], count)
    micros = [[bundles[i] for i in part] for part in parts if part]
    return sorted(micros, key=lambda micro: -sum(bundle.cost for bundle in micro))


def split_rows(
    sizes: RowSizes,
    dp_size: int,
    micro_batch_size: MicroBatchSize,
    rows: Sequence[int] | None = None,
) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Deal ``rows``, or all, to ranks for a forward pass, as ``plan_steps`` does for a step.

    Returns each rank's rows, [-1] if none, and [rank][micro-batch] indices into them, or -1.
    """
    rows = list(range(len(sizes.lengths)) if rows is None else rows)
    shards, (cut,) = _indexed([_cut(rows, sizes, dp_size, micro_batch_size)], dp_size)
    return shards, cut


def join_rows(shards: list[list[int]], columns: list[Tensor], shape: tuple[int, int]) -> Tensor:
    """Invert a split: put the ranks' columns, (rows,) or (rows, width, ...), back in batch order.

    Returns (B,) or (B, T, ...), where ``shape`` is the batch's (B, T); other rows hold 0.
    """
    filled = [(rows, column) for rows, column in zip(shards, columns, strict=True) if rows != [-1]]
    first = columns[0]
    result = first.new_zeros(shape + first.shape[2:] if first.dim() > 1 else shape[:1])
    for rows, column in filled:
        if column.dim() > 1:
            result[torch.tensor(rows), : column.shape[1]] = column
        else:
            result[torch.tensor(rows)] = column
    return result
