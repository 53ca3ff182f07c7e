"""On-policy against asynchronous training on a task with long-tailed lengths.

    OMP_NUM_THREADS=1 python -m benchmarks.asynchronous --seeds 0 1 2 --steps 30

Two cores: engine and policy are pinned to one each. Lengths are lognormal, sigma 1
(``long_tails``). Settings take turns, seed by seed, over the same processes: Ray actors, vLLM,
DeepSpeed. Prints samples/s, ages, waits and the reward of the last steps after equal samples."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.long_tails import CAP
from benchmarks.options import model_options, parser_of
from benchmarks.step_breakdown import config_of, make_task
from openrl.cli.run import silence
from openrl.config.commands import PPOConfig
from openrl.config.groups.placement import ENGINES
from openrl.trainer.launch import train
from openrl.trainer.planning.prepare import prepare
from openrl.workers.roles import Roles, assign_roles, start_roles, worker_arguments

REWARD = '''
def reward_func(queries, prompts, labels, **kwargs):
    """The share of digits in the response."""
    texts = [q[len(p):] for q, p in zip(queries, prompts)]
    return {"rewards": [sum(c.isdigit() for c in t) / max(len(t), 1) for t in texts]}
'''
AHEAD = {"async_train": True, "partial_rollout": True}
CORRECTED = {"enable_vllm_is_correction": True}
SETTINGS: dict[str, dict[str, object]] = {
    "on-policy": {},
    "carried over, 1.5 x": {"partial_rollout": True, "oversample_ratio": 1.5} | CORRECTED,
    "a step ahead, drained": {"async_train": True} | CORRECTED,
    "a step ahead": AHEAD | CORRECTED,
    "a step ahead, not corrected": AHEAD,
    "two steps ahead": AHEAD | CORRECTED | {"async_queue_size": 2},
    "two steps ahead, not corrected": AHEAD | {"async_queue_size": 2},
}
SHOWN = {
    "samples/s": "perf/samples_per_second",
    "age": "rollout/age_mean",
    "oldest": "rollout/age_max",
    "trainer waits, s": "rollout/trainer_wait_seconds",
    "engine waits, s": "rollout/engine_wait_seconds",
    "reward": "rollout/reward",
}


class Processes:
    """The workers of all runs; each run gets its policy built anew."""

    def __init__(self, roles: Roles) -> None:
        self.groups = {"actor": roles.policy, ENGINES: roles.engines}

    @contextlib.asynccontextmanager
    async def lend(self, config: PPOConfig, device: Any, steps: int, stage: Any) -> AsyncIterator:
        spec = worker_arguments(config, device, steps)["actor"][1]
        await self.groups["actor"].call("start", spec)
        for finish_running in (True, False):  # the run before may have ended in a pause
            await self.groups[ENGINES].call("resume", finish_running)
        yield assign_roles(config, self.groups)


def config(args: argparse.Namespace, folder: Path, seed: int, **changes: object) -> PPOConfig:
    flags = {
        "ref_num_gpus_per_node": None,
        "use_kl_loss": None,
        "kl_estimator": None,
        "init_kl_coef": 0.0,
        "packing_samples": True,
        "generate_max_len": CAP,
        "train_batch_size": args.prompts * args.samples,
        "actor_learning_rate": 1e-3,
        "seed": seed,
        "plugin": "benchmarks.long_tails",
        "train_generations_to_log": 0,
        "overwrite_ckpt": True,  # settings take turns in one folder
    }
    return config_of(args, folder, args.steps, **(flags | changes))


async def run(args: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in args.settings}
    first = config(args, folder, 0, **AHEAD)
    starting = start_roles(first, prepare(first).device, 1, lambda name: contextlib.nullcontext())
    async with starting as roles:
        processes = Processes(roles)
        for seed in args.seeds:
            for name in args.settings:
                made = config(args, folder, seed, **SETTINGS[name])
                with contextlib.redirect_stdout(sys.stderr):
                    await train(made, prepare(made), processes.lend)
                lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
                steps = [json.loads(line) for line in lines]
                found[name].append(figures(steps, args.warmup))
                print(f"{name}, seed {seed}: {found[name][-1]}", file=sys.stderr)
    return found


def figures(steps: list[dict[str, float]], warmup: int) -> dict[str, float]:
    """Means over the steps after ``warmup``; the reward over the last five."""
    later = steps[warmup:]
    seconds = sum(step["time/step"] for step in later)
    values = {name: mean(step.get(key, 0.0) for step in later) for name, key in SHOWN.items()}
    values["samples/s"] = sum(step["rollout/samples"] for step in later) / seconds
    values["oldest"] = max(step.get("rollout/age_max", 0.0) for step in later)
    values["reward"] = mean(step["rollout/reward"] for step in steps[-5:])
    return values


def table(found: dict[str, list[dict[str, float]]]) -> str:
    lines = [f"| setting | {' | '.join(SHOWN)} | to on-policy |", "|---" * (len(SHOWN) + 2) + "|"]
    base = mean(run["samples/s"] for run in found["on-policy"])
    for name, runs in found.items():
        cells = []
        for figure in SHOWN:
            values = [run[figure] for run in runs]
            spread = f" ({min(values):.3g} to {max(values):.3g})" if len(values) > 1 else ""
            cells.append(f"{mean(values):.3g}{spread}")
        ratio = mean(run["samples/s"] for run in runs) / base
        lines.append(f"| {name} | {' | '.join(cells)} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=3, help="steps that no time is taken of")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4, help="per prompt")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.set_defaults(tokens=CAP)
    model_options(parser)
    args = parser.parse_args()
    silence()
    with tempfile.TemporaryDirectory(prefix="openrl_async_") as folder:
        make_task(args, Path(folder))
        (Path(folder) / "reward.py").write_text(REWARD)
        print(table(asyncio.run(run(args, Path(folder)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
