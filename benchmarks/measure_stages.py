"""Stage times of steps of several shapes, for ``simulate_placement --metrics`` and its test.

    python -m benchmarks.measure_stages --output steps.jsonl --shapes 16x48 64x16 --rounds 5

runs the real pipeline of ``step_breakdown`` on a CPU, one step of each shape (prompts x tokens of
every response) after the other, so that a busy machine slows all shapes alike. Writes the metrics
of each step with its shape, one line a step.

``--in_process`` hosts all workers in this process, with transformers as the engine, and counts
seconds of the processor: what the step takes on a quiet machine, however busy this one is."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.options import model_options, parser_of
from benchmarks.step_breakdown import config_of, make_task, pipeline_side
from openrl.cli.run import silence
from openrl.cluster.group import LocalGroup, WorkerGroup
from openrl.config.commands import PPOConfig
from openrl.models.device import Device
from openrl.tracking.progress import Stage
from openrl.trainer.planning.prepare import Inputs, prepare
from openrl.workers.roles import Roles, assign_roles, worker_arguments

KEPT = (
    *(f"time/{name}" for name in ("rollout", "annotate", "reward", "train", "sync", "step")),
    *(f"rollout/{name}" for name in ("samples", "tokens", "prompt_length", "response_length_max")),
)

MANY = 1_000_000


def shape(word: str) -> tuple[int, int]:
    prompts, tokens = map(int, word.split("x"))
    return prompts, tokens


@asynccontextmanager
async def in_process(
    config: PPOConfig, device: Device, steps: int, stage: Stage
) -> AsyncIterator[Roles]:
    """All worker groups in this process; the engine decodes all answers of a step together."""
    groups: dict[str, WorkerGroup] = {}
    config = replace(config, engine=replace(config.engine, vllm_max_num_seqs=MANY))
    for role, (worker_class, *args) in worker_arguments(config, device, steps).items():
        groups[role] = LocalGroup.create(role, 1, worker_class, *args)
        await groups[role].call("start")
    try:
        yield assign_roles(config, groups)
    finally:
        for group in groups.values():
            await group.close()


async def run(args: argparse.Namespace, config: PPOConfig, inputs: Inputs) -> None:
    where = {"start": in_process, "clock": time.process_time} if args.in_process else {}
    async with pipeline_side(config, inputs, **where) as side:
        args.output.write_text("")
        for number in range(args.warmup + args.rounds):
            for prompts, tokens in args.shapes:
                side.ask_for(prompts, max_tokens=tokens)
                values = await side.step()
                if number >= args.warmup:
                    measured = {name: round(values[name], 4) for name in KEPT if name in values}
                    with args.output.open("a") as file:
                        file.write(json.dumps({"shape": f"{prompts}x{tokens}"} | measured) + "\n")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--shapes", type=shape, nargs="+", default=[(16, 48), (64, 16), (32, 32), (64, 40)]
    )
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument(
        "--train_batch_size", type=int, default=128, help="rows of an optimizer step"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1, help="rounds that are not counted")
    parser.add_argument(
        "--in_process", action="store_true", help="no other processes, seconds of the processor"
    )
    parser.add_argument("--colocated", action="store_true", help="all roles on one worker slot")
    model_options(parser)
    args = parser.parse_args()
    args.prompts, args.tokens = (max(s[i] for s in args.shapes) for i in (0, 1))
    silence()
    with tempfile.TemporaryDirectory(prefix="openrl_stages_") as folder:
        make_task(args, Path(folder))
        changes = {
            "train_batch_size": args.train_batch_size,
            "colocate_all_models": args.colocated or None,
        }
        if args.in_process:
            changes["rollout_backend"] = "hf"
        config = config_of(
            args, Path(folder), (args.warmup + args.rounds) * len(args.shapes), **changes
        )
        asyncio.run(run(args, config, prepare(config)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
