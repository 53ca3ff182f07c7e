"""What leaving out saves: processor seconds of the same optimizer step with every row and token
computed, with the output head on the trained tokens alone, and without the rows of flat groups.

    python -m benchmarks.left_out
    python -m benchmarks.left_out --pretrain DIR --groups 2 --pairs 2

One engine over a random model, or the one in DIR, takes turns at three ways to run a step over
groups of 8 answers, of which a share is flat. Gradient norms must agree, else it raises. One
thread, fp32; seconds are those of the processor, so that other work on the machine does not
count."""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.options import device_option, parser_of
from benchmarks.pairs import busy_seconds, spread
from benchmarks.training import ANSWERS, UPDATE, make_llama, rollout, spec_of
from openrl.algorithms.batching import plan_steps
from openrl.experience import ExperienceBatch, StepCounts
from openrl.training_engine.build import build_engine
from openrl.training_engine.deepspeed_engine import DeepSpeedEngine
from openrl.training_engine.distributed import init_distributed
from openrl.training_engine.updates import Forward, LossOf


@dataclass(frozen=True)
class ScoringAll:
    """The same loss, with log-probs of prompts and padding computed as well."""

    update: LossOf

    def __call__(self, forward: Forward, batch: ExperienceBatch, counts: StepCounts) -> tuple:
        def every(micro: ExperienceBatch, *outputs: str) -> tuple:
            scored = micro.attention_mask.clone()
            scored[:, 0] = False
            return forward(micro.replace(loss_mask=scored), *outputs)

        return self.update(every, batch, counts)


def step(
    engine: DeepSpeedEngine, batch: ExperienceBatch, computed: Tensor | None, update: LossOf
) -> tuple[float, float]:
    """Seconds of work, and the gradient norm."""
    dealt = plan_steps(batch, 1, len(batch), ANSWERS, computed=computed)
    shard = batch.select(dealt.shards[0])
    started = busy_seconds(engine.device.type)
    report = engine.train_step(shard, dealt.steps[0][0], update)
    return busy_seconds(engine.device.type) - started, float(report["grad_norm"].value or 0)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--pretrain", help="a model's directory; without it a random one")
    parser.add_argument("--hidden_size", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--flat", type=float, default=0.5, help="share of groups")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--answer", type=int, default=64, help="most tokens")
    parser.add_argument("--pairs", type=int, default=5)
    device_option(parser)
    args = parser.parse_args()
    init_distributed(0, 1, "127.0.0.1", 0, args.device, timeout=60)
    with tempfile.TemporaryDirectory() as name:
        if args.pretrain is None:
            make_llama(
                name,
                vocab_size=args.vocabulary,
                hidden_size=args.hidden_size,
                num_hidden_layers=args.layers,
                num_attention_heads=args.hidden_size // 64,
            )
        engine = build_engine(spec_of(args.pretrain or name, args.device))
    measure(engine, args)


def measure(engine: DeepSpeedEngine, args: argparse.Namespace) -> None:
    vocabulary = engine.model.config.get_text_config().vocab_size
    flat = round(args.flat * args.groups)
    batch = rollout(args.groups, flat, args.prompt, args.answer, vocabulary)
    ways: tuple[tuple[str, Tensor | None, LossOf], ...] = (
        ("all rows and tokens", None, ScoringAll(UPDATE)),
        ("head on trained tokens", None, UPDATE),
        ("and without flat groups", UPDATE.gradient_rows(batch), UPDATE),
    )
    rounds = [
        [step(engine, batch, rows, update) for _, rows, update in ways]
        for _ in range(args.pairs + 1)
    ][1:]
    norms = [norm for found in rounds for _, norm in found]
    if max(norms) - min(norms) > 1e-4 * max(norms):
        raise ArithmeticError(f"gradient norms differ: {min(norms)} to {max(norms)}")
    table = Table("computed", "seconds", "saved: times as fast")
    for place, (name, *_) in enumerate(ways):
        ratio = spread([found[0][0] / found[place][0] for found in rounds], 2)
        table.add_row(name, f"{median(found[place][0] for found in rounds):.2f}", ratio)
    Console().print(
        f"{engine.parameter_count():,} parameters, vocabulary {vocabulary:,}, {len(batch)} rows of"
        f" {args.prompt} + {int(batch.response_lengths.double().mean())} tokens, {flat} of"
        f" {args.groups} groups flat, {args.pairs} interleaved rounds, median"
    )
    Console().print(table)


if __name__ == "__main__":
    main()
