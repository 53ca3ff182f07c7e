"""What of a training step is padding, and how even the ranks are: the trainer's own planning on
rows of lognormal lengths.

    python -m benchmarks.padding

plans one optimizer step over rows with a median of 6,144 and at most 65,536 tokens, for a few
spreads of the logarithm of lengths: padded and packed micro-batches of some rows, and dynamic ones
of at most so many tokens. Padding is the share of computed tokens that nobody needs, filled the
share of the token cap that micro-batches use, imbalance what the busiest of the ranks costs over
the mean one: with rows dealt in order, by tokens, and by cost (linear layers and attention, of a
dense model of 8B parameters). Pure arithmetic: no model, no process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from transformers import PretrainedConfig

from benchmarks.options import parser_of
from openrl.algorithms.batching import PER_TOKEN, MicroBatchSize, TokenCap, TrainingPlan, split_rows
from openrl.algorithms.partition import RowCost
from openrl.algorithms.row_sizes import RowSizes
from openrl.experience import StepCounts, StepPlan
from openrl.models.cost import cost_of
from openrl.trainer.learning.rows import BatchingSpec, work_metrics

MEDIAN, LONGEST = 6144, 65_536
QWEN3_8B = PretrainedConfig(
    hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    intermediate_size=12288, vocab_size=151936,
)  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """Of one optimizer step."""

    padding: float
    imbalance: float
    micro_batches: float


def lognormal_lengths(rows: int, spread: float, seed: int = 0) -> list[int]:
    """Tokens of each row."""
    rng = random.Random(seed)
    return [min(max(int(rng.lognormvariate(0, spread) * MEDIAN), 1), LONGEST) for _ in range(rows)]


def figures(
    lengths: Sequence[int],
    ranks: int,
    size: MicroBatchSize,
    dealt: RowCost,
    cost: RowCost,
    packed: bool,
) -> Figures:
    """Rows dealt by one cost, weighed by another."""
    shards, of_ranks = split_rows(RowSizes(lengths, dealt), ranks, size)
    counts = StepCounts(sum(lengths), len(lengths), ranks)
    plan = TrainingPlan(shards, [[StepPlan(micro_batches, counts) for micro_batches in of_ranks]])
    metrics = work_metrics(RowSizes(lengths, cost), plan, BatchingSpec(size, size, cost, packed))
    return Figures(
        *(
            float(metrics[f"perf/{n}"].value or 0)
            for n in ("padding_waste", "rank_imbalance", "micro_batches")
        )
    )


def in_order(lengths: Sequence[int], ranks: int, cost: RowCost) -> float:
    """Imbalance of rows that are dealt like cards."""
    loads = [sum(cost(n) for n in lengths[rank::ranks]) for rank in range(ranks)]
    return max(loads) / (sum(loads) / ranks)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=1024, help="samples of an optimizer step")
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--micro_train_batch_size", type=int, default=8)
    parser.add_argument("--train_max_tokens_per_gpu", type=int, default=LONGEST)
    parser.add_argument("--spreads", type=float, nargs="+", default=[0.5, 0.75, 1.2])
    args = parser.parse_args()

    cost, cap = cost_of(QWEN3_8B), args.train_max_tokens_per_gpu
    rows = args.micro_train_batch_size
    cuts: dict[str, tuple[MicroBatchSize, bool]] = {
        f"padded, {rows} rows": (rows, False),
        f"packed, {rows} rows": (rows, True),
        f"dynamic, {cap:,} tokens": (TokenCap(cap), True),
    }
    columns = (
        "spread, longest, cut, micro-batches, padding, filled, dealt in order, by tokens, by cost"
    )
    table = Table(*columns.split(", "))
    for spread in args.spreads:
        lengths = lognormal_lengths(args.rows, spread)
        for name, (size, packed) in cuts.items():
            by_tokens, by_cost = (
                figures(lengths, args.ranks, size, by, cost, packed) for by in (PER_TOKEN, cost)
            )
            filled = sum(lengths) / (by_cost.micro_batches * args.ranks * cap)
            dealt = in_order(lengths, args.ranks, cost), by_tokens.imbalance, by_cost.imbalance
            table.add_row(
                f"{spread:g}",
                f"{max(lengths):,}",
                name,
                f"{by_cost.micro_batches:g}",
                f"{by_cost.padding:.2%}",
                f"{filled:.0%}" if isinstance(size, TokenCap) else "",
                *(f"{imbalance:.4f}" for imbalance in dealt),
            )
    Console(width=120).print(f"{args.rows:,} rows on {args.ranks} ranks")
    Console(width=120).print(
        table, "last columns: cost of the busiest rank over the mean", sep="\n"
    )


if __name__ == "__main__":
    main()
