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

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.options import device_option, parser_of
from benchmarks.pairs import busy_seconds
from openrl.algorithms.batching import plan_steps
from openrl.algorithms.collate import turn_ids
from openrl.algorithms.policy_losses import PPOOptions
from openrl.config.groups.deepspeed import DeepSpeedFlags
from openrl.config.groups.model import ModelFlags
from openrl.config.groups.optimizer import OptimizerFlags
from openrl.experience import ExperienceBatch, StepCounts
from openrl.training.build import ModelSpec, build_engine
from openrl.training.deepspeed_engine import DeepSpeedEngine
from openrl.training.distributed import init_distributed
from openrl.training.optimizers import OptimSpec
from openrl.training.updates import Forward, LossOf, PolicyUpdate

ANSWERS = 8
UPDATE = PolicyUpdate("ppo", PPOOptions(), "token-mean")
OPTIM = OptimSpec(
    learning_rate=0.0,  # every step starts from the same weights
    flags=OptimizerFlags(lr_scheduler="constant", l2=0.0),
    total_steps=1000,
)


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


def rollout(groups: int, flat: int, prompt: int, answer: int, vocabulary: int) -> ExperienceBatch:
    """Random tokens, answers of ``answer`` tokens at most; the first ``flat`` groups have no
    advantages."""
    g = torch.Generator().manual_seed(0)
    rows, width = groups * ANSWERS, prompt + answer
    lengths = prompt + torch.randint(answer // 2, answer + 1, (rows, 1), generator=g)
    attention = torch.arange(width) < lengths
    mask = attention & (torch.arange(width) >= prompt)
    group_ids = torch.arange(groups).repeat_interleave(ANSWERS)
    advantages = torch.randn(rows, 1, generator=g) * (group_ids >= flat)[:, None]
    return ExperienceBatch(
        token_ids=torch.randint(0, vocabulary, (rows, width), generator=g) * attention,
        attention_mask=attention,
        loss_mask=mask,
        rollout_logprobs=torch.zeros(rows, width),
        trajectory_ids=torch.arange(rows),
        group_ids=group_ids,
        rewards=torch.zeros(rows),
        truncated=torch.zeros(rows, dtype=torch.bool),
        passed=torch.full((rows,), torch.nan),
        turn_ids=turn_ids(mask),
        sources=["default"] * rows,
        advantages=advantages * mask,
    )


def build(path: str, device: str) -> DeepSpeedEngine:
    flags = ModelFlags(pretrain=path, param_dtype="fp32")
    deepspeed = DeepSpeedFlags(zero_stage=0)
    return build_engine(ModelSpec("logprobs", path, flags, deepspeed, OPTIM, device, seed=0))


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
            torch.manual_seed(0)
            heads = args.hidden_size // 64
            config = LlamaConfig(
                vocab_size=args.vocabulary,
                hidden_size=args.hidden_size,
                intermediate_size=args.hidden_size * 3,
                num_hidden_layers=args.layers,
                num_attention_heads=heads,
                num_key_value_heads=heads,
                tie_word_embeddings=True,
            )
            LlamaForCausalLM(config).save_pretrained(name)
        engine = build(args.pretrain or name, args.device)
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
        ratios = sorted(found[0][0] / found[place][0] for found in rounds)
        ratio = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        table.add_row(name, f"{median(found[place][0] for found in rounds):.2f}", ratio)
    Console().print(
        f"{engine.parameter_count():,} parameters, vocabulary {vocabulary:,}, {len(batch)} rows of"
        f" {args.prompt} + {int(batch.response_lengths.double().mean())} tokens, {flat} of"
        f" {args.groups} groups flat, {args.pairs} interleaved rounds, median"
    )
    Console().print(table)


if __name__ == "__main__":
    main()
