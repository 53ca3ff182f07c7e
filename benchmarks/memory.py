"""What --dry_run estimates for the policy against what training takes.

    python -m benchmarks.memory
    python -m benchmarks.memory --only "135M, fp32"

Every case trains a random Llama for two steps in a process of its own, on a CPU, with the
environment of a run's workers. What the process takes at its peak beyond what is left after steps
of a tiny model, which load all libraries, is held against ``model_memory`` and
``in_size_classes``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.options import parser_of
from benchmarks.pairs import of_process
from benchmarks.training import UPDATE, make_llama, rollout, spec_of
from openrl.algorithms.batching import plan_steps
from openrl.cluster.ray_group import worker_env
from openrl.config.groups.deepspeed import DeepSpeedFlags
from openrl.config.groups.lora import LoRAFlags
from openrl.trainer.planning.memory_estimate import (
    Memory,
    in_size_classes,
    model_memory,
    model_shape,
)
from openrl.training_engine.build import ModelSpec, build_engine
from openrl.training_engine.distributed import init_distributed
from openrl.training_engine.sleep import empty_cache

SHAPES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 64},
    "1M": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 512},
    "32M": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
    | {"vocab_size": 8192},
    "135M": {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9}
    | {"num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152},
}


@dataclass(frozen=True)
class Case:
    size: str
    dtype: str = "fp32"
    rows: int = 8  # of the micro-batch, 128 tokens each
    lora_rank: int = 0
    in_4bit: bool = False
    packing: bool = False
    recompute: bool = False

    @property
    def name(self) -> str:
        words = {
            f"LoRA {self.lora_rank}": self.lora_rank,
            "4 bit": self.in_4bit,
            "packed": self.packing,
            "recomputed": self.recompute,
        }
        return ", ".join([self.size, self.dtype, *(word for word, is_so in words.items() if is_so)])

    @property
    def lora(self) -> LoRAFlags | None:
        if not self.lora_rank:
            return None
        return LoRAFlags(lora_rank=self.lora_rank, load_in_4bit=self.in_4bit)

    @property
    def deepspeed(self) -> DeepSpeedFlags:
        return DeepSpeedFlags(zero_stage=1, gradient_checkpointing=self.recompute)


CASES = [
    Case("1M", rows=32),
    Case("1M", "bf16", rows=32, packing=True),
    Case("32M"),
    Case("32M", "bf16", recompute=True),
    Case("32M", lora_rank=16, packing=True),
    Case("135M"),
    Case("135M", "bf16", recompute=True),
    Case("135M", "bf16", lora_rank=16, in_4bit=True),
]
PROMPT, ANSWER = 32, 96  # tokens
STEPS = 2


def spec(path: str, case: Case) -> ModelSpec:
    changes = {"deepspeed": case.deepspeed, "packing": case.packing, "lora": case.lora}
    return spec_of(path, dtype=case.dtype, **changes)


def train(path: str, case: Case) -> None:
    """Optimizer steps of two micro-batches each."""
    engine = build_engine(spec(path, case))
    vocabulary = engine.model.config.get_text_config().vocab_size
    batch = rollout(case.rows // 4, 0, PROMPT, ANSWER, vocabulary)
    batch.attention_mask[:] = True
    dealt = plan_steps(batch, 1, len(batch), case.rows)
    shard = batch.select(dealt.shards[0])
    for _ in range(STEPS):
        engine.train_step(shard, dealt.steps[0][0], UPDATE)


def estimate(path: str, case: Case) -> Memory:
    tokens = case.rows * (PROMPT + ANSWER)
    memory = model_memory(spec(path, case), model_shape(path, False), 1, tokens)
    return in_size_classes(memory)


def measure(case: Case, tiny: str, path: str) -> None:
    """Prints bytes at the peak, and the estimate, as JSON."""
    torch.set_num_threads(1)
    init_distributed(0, 1, "127.0.0.1", 0, "cpu", timeout=60)
    train(tiny, Case("tiny", case.dtype, 8, case.lora_rank and 1, case.in_4bit, case.packing))
    empty_cache(torch.device("cpu"))  # otherwise the case begins in memory that is there already
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = of_process("VmRSS")
    train(path, case)
    peak = of_process("VmHWM") - before
    print(json.dumps({"peak": peak, "estimate": asdict(estimate(path, case))}))


def in_process(name: str, models: Path) -> tuple[int, int]:
    """The estimate of a case and the peak of a process that trains it, in bytes."""
    words = [sys.executable, "-m", "benchmarks.memory", "--case", name, "--models", str(models)]
    env = os.environ | worker_env("actor", "cpu", 1, local=True)
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=env)
    found = json.loads(done.stdout.splitlines()[-1])
    return Memory(**found["estimate"]).total, found["peak"]


def main() -> None:
    parser = parser_of(__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("--only", choices=names, nargs="+", default=names)
    parser.add_argument("--case", choices=names, help="this one, in this process")
    parser.add_argument("--models", type=Path, help="with --case: where the models are")
    args = parser.parse_args()
    if args.case is not None:
        case = CASES[names.index(args.case)]
        measure(case, str(args.models / "tiny"), str(args.models / case.size))
        return
    table = Table("case", "estimate, MiB", "measured, MiB", "estimate / measured")
    with tempfile.TemporaryDirectory() as directory:
        models = Path(directory)
        for size in {case.size for case in CASES if case.name in args.only} | {"tiny"}:
            make_llama(models / size, **SHAPES[size])
        for name in args.only:
            total, peak = in_process(name, models)
            sizes = (f"{size / 2**20:,.0f}" for size in (total, peak))
            table.add_row(name, *sizes, f"{total / peak:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
