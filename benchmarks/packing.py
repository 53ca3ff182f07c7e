"""Training with and without padding: real tokens per second of the same optimizer step.

    python -m benchmarks.packing

builds two engines over one small random model, one of them with packing, and lets them take turns
at the same step over rows of lognormal lengths. The plan is the trainer's: rows of like length
share a micro-batch. Prints the share of padding and the median speed of each with their ratio, for
small and large micro-batches. One thread; seconds are those of the processor, so that other work on
the machine does not count."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.options import device_option, parser_of
from benchmarks.pairs import busy_seconds, spread
from benchmarks.training import OPTIM, spec_of
from examples.python.make_model import countdown, make_model
from openrl.algorithms.batching import plan_steps
from openrl.data.answers import SupervisedRow
from openrl.data.supervised import collate_rows
from openrl.experience import StepPlan, TokenBatch
from openrl.training_engine.build import build_engine
from openrl.training_engine.deepspeed_engine import DeepSpeedEngine
from openrl.training_engine.distributed import init_distributed
from openrl.training_engine.updates import SupervisedUpdate


def ragged_rows(count: int, spread: float, longest: int) -> TokenBatch:
    """Random tokens; lengths are lognormal with a median of an eighth of the longest."""
    g = torch.Generator().manual_seed(0)
    lengths = (
        (longest / 8 * (spread * torch.randn(count, generator=g)).exp())
        .clamp(4, longest)
        .int()
        .tolist()
    )
    rows = [torch.randint(4, 20, (n,), generator=g).tolist() for n in lengths]
    return collate_rows(
        [SupervisedRow(ids, [False] + [True] * (len(ids) - 1)) for ids in rows], pad_id=0
    )


def seconds(engine: DeepSpeedEngine, batch: TokenBatch, plan: StepPlan) -> float:
    started = busy_seconds(engine.device.type)
    engine.train_step(batch, plan, SupervisedUpdate())
    return busy_seconds(engine.device.type) - started


def padding(batch: TokenBatch, plan: StepPlan) -> float:
    """The share of tokens that a padded step computes for nothing."""
    computed = sum(batch.select(rows).token_ids.numel() for rows in plan.micro_batches)
    return 1 - int(batch.attention_mask.sum()) / computed


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument(
        "--spread", type=float, default=0.75, help="standard deviation of the logarithm of lengths"
    )
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--hidden_size", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--micro_batch_sizes", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--pairs", type=int, default=7)
    device_option(parser)
    args = parser.parse_args()

    batch = ragged_rows(args.rows, args.spread, args.longest)
    tokens = int(batch.attention_mask.sum())
    table = Table("rows", "padding", "padded, tokens/s", "packed, tokens/s", "ratio")
    init_distributed(0, 1, "127.0.0.1", 0, args.device, timeout=60)
    with tempfile.TemporaryDirectory() as name:
        tokenizer = countdown()
        torch.manual_seed(0)
        make_model(tokenizer, args.hidden_size, args.layers).save_pretrained(name)
        optim = replace(OPTIM, learning_rate=1e-4)
        padded, packed = (
            build_engine(spec_of(name, args.device, optim=optim, packing=way))
            for way in (False, True)
        )
        for size in args.micro_batch_sizes:
            dealt = plan_steps(batch, 1, args.rows, size)
            shard, plan = batch.select(dealt.shards[0]), dealt.steps[0][0]
            pairs = [
                (seconds(padded, shard, plan), seconds(packed, shard, plan))
                for _ in range(args.pairs + 1)
            ][1:]
            speeds = [f"{tokens / median(times):,.0f}" for times in zip(*pairs, strict=True)]
            ratio = spread([a / b for a, b in pairs], 2)
            table.add_row(str(size), f"{padding(shard, plan):.0%}", *speeds, ratio)
    Console().print(
        f"{args.rows} rows, {tokens} tokens, hidden size {args.hidden_size}, fp32,"
        f" {'one thread' if args.device == 'cpu' else 'one GPU'}, {args.pairs} interleaved pairs, median"
    )
    Console().print(table, "rows: of a micro-batch; ratio: packed to padded", sep="\n")


if __name__ == "__main__":
    main()
