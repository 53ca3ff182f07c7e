"""Where the time of a training step goes, beside the bare libraries that do the same work.

    python -m benchmarks.step_breakdown

runs the real pipeline (Ray actors, vLLM, DeepSpeed policy and reference, group_norm with a KL loss)
on Countdown prompts with responses of a fixed length. Between its steps, bare vLLM generates as
many tokens for the same prompts, and a plain PyTorch loop makes the same forward passes, backward
passes and AdamW steps on the same rows. Prints the median of each stage and the ratio of a pipeline
step to the bare work. One thread per process; ``--cores 0`` puts all processes on one core, where
nothing can overlap."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch; every process started from here inherits it

import torch
from rich.console import Console

from benchmarks.bare import Bare, Generation, Training, TrainWork, serve_torch, serve_vllm
from benchmarks.options import model_options, pair_options, parsed, parser_of, work_options
from benchmarks.pairs import PAUSE_S, QuietPairs, spread
from openrl.config.commands import PPOConfig
from openrl.config.groups.placement import ENGINES
from openrl.flags.parser import load
from openrl.tracking.progress import Progress
from openrl.trainer.launch import StartRoles, build_trainer
from openrl.trainer.planning.prepare import Inputs, prepare
from openrl.trainer.rl_trainer import RLTrainer
from openrl.trainer.saving.checkpoints import Checkpoints
from openrl.trainer.watching.supervision import StopRequest
from openrl.types import Prompt, PromptGroup
from openrl.workers.roles import start_roles, worker_arguments

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("rollout", "annotate", "train", "sync")

# everything beside bare vLLM on the same one
ONE_GPU = {
    "actor_num_gpus_per_node": 1,
    "colocate_all_models": True,
    "vllm_num_engines": None,
    "vllm_gpu_memory_utilization": 0.3,
}

REWARD = '''
def reward_func(queries, prompts, labels, responses, **kwargs):
    """The share of digits: a model of random weights never solves a problem, and equal rewards give no gradient."""
    return [sum(c.isdigit() for c in text) / len(text) for text in responses]
'''

# -- the pipeline's side ---------------------------------------------------------------------------


def task_flags(args: argparse.Namespace, folder: Path, out: Path) -> dict[str, object]:
    """The flags of runs on what ``make_task`` made."""
    return {
        "pretrain": folder / "model",
        "prompt_data": folder / "data" / "rl.jsonl",
        "label_key": "label",
        "remote_rm_url": folder / "reward.py",
        "vllm_num_engines": 1,
        "device": args.device,
        "param_dtype": "fp32",
        "zero_stage": args.zero_stage,
        "advantage_estimator": "group_norm",
        "init_kl_coef": 0.001,
        "prompt_max_len": 32,
        "save_path": out,
        "ckpt_path": out / "checkpoints",
    }


def config_of(
    args: argparse.Namespace, folder: Path, max_steps: int, **changes: object
) -> PPOConfig:
    """The quickstart's flags with a constant learning rate; made into a config as the command makes
    it. Of ``changes``, True is a switch and None leaves a flag out."""
    half = args.prompts * args.samples // 2
    flags = task_flags(args, folder, folder / "run") | {
        "input_key": "input",
        "use_kl_loss": True,
        "kl_estimator": "k3",
        "rollout_batch_size": args.prompts,
        "n_samples_per_prompt": args.samples,
        "train_batch_size": half,
        "micro_train_batch_size": min(64, half),
        "micro_rollout_batch_size": 128,
        "generate_max_len": args.tokens,
        "actor_learning_rate": 1e-6 if args.pretrain else 5e-4,  # a trained model stays near itself
        "lr_scheduler": "constant",
        "max_steps": max_steps,
    }
    if args.device == "cuda":
        flags |= ONE_GPU
    words: list[str] = []
    for name, value in (flags | changes).items():
        if value is not None:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return load(PPOConfig, words, prog="benchmark")


class Recorder:
    """A worker group that keeps the arguments of its latest calls: the very rows that the bare loop
    repeats."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.latest: dict[str, Sequence[tuple[Any, ...]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    async def scatter(self, method: str, shards: Sequence[tuple[Any, ...]]) -> list[Any]:
        self.latest[method] = shards
        return await self._group.scatter(method, shards)

    def work(self) -> TrainWork:
        ((forward, micro_batches, *_),) = self.latest["forward"]
        (((update, plans, loss_of),),) = self.latest["begin_update"]
        return TrainWork(
            forward, micro_batches, update, plans, loss_of.kl_coef, loss_of.options.eps_clip
        )


@dataclass
class Side:
    """The running pipeline, with what its last step saw."""

    trainer: RLTrainer
    policy: Recorder
    prompts: list[Prompt]
    values: dict[str, float]

    async def step(self) -> dict[str, float]:
        """One training step as a run makes it, logs included. Its metrics."""
        self.trainer.progress.lap()
        await self.trainer.run_step(self.trainer.step + 1)
        return self.values

    def ask_for(self, prompts: int | None = None, **sampling: object) -> None:
        """From the next step on: so many prompts, and other values of sampling."""
        rollouts = self.trainer.rollouts
        drawn = replace(rollouts.request.sampling, **sampling)
        rollouts.request = replace(rollouts.request, sampling=drawn)
        if prompts is not None:
            limits = rollouts.buffer.limits
            rollouts.buffer.limits = replace(limits, wanted=prompts, running=prompts)


@asynccontextmanager
async def pipeline_side(
    config: PPOConfig,
    inputs: Inputs,
    ignore_eos: bool = True,
    start: StartRoles = start_roles,
    clock: Callable[[], float] = time.perf_counter,
) -> AsyncIterator[Side]:
    """The running pipeline, over the worker groups of ``start``. With ``ignore_eos`` every response
    has its full length."""
    steps = 2 * (config.batch.max_steps or 0)
    with Progress(
        "breakdown", steps, (), console=Console(file=StringIO()), clock=clock
    ) as progress:
        async with start(config, inputs.device, steps, progress.stage) as roles:
            policy = Recorder(roles.policy)
            roles = replace(roles, policy=policy)
            checkpoints = Checkpoints(config.checkpoint, {})
            trainer = build_trainer(config, inputs, roles, checkpoints, progress, StopRequest())
            side = Side(trainer, policy, [], {})
            side.ask_for(ignore_eos=ignore_eos)
            _listen(side)
            await trainer.begin()
            try:
                yield side
            finally:
                await trainer.rollouts.close()
            trainer.trackers.close()


def _listen(side: Side) -> None:
    """Keep the metrics and the prompts of each step, which costs no time."""
    trackers = side.trainer.trackers
    log, log_samples = trackers.log, trackers.log_samples

    def logging(step: int, values: dict[str, float]) -> None:
        side.values = values
        log(step, values)

    def logging_samples(step: int, groups: list[PromptGroup]) -> None:
        side.prompts = [group.prompt for group in groups]
        log_samples(step, groups)

    trackers.log = logging  # type: ignore[method-assign]
    trackers.log_samples = logging_samples  # type: ignore[method-assign]


# -- pairs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """One step of the pipeline and the same work done bare."""

    pipeline: dict[str, float]  # metrics of the step, times included
    generation: Generation
    training: Training

    @property
    def bare_seconds(self) -> float:
        return (
            self.generation.seconds + self.training.forward_seconds + self.training.update_seconds
        )

    @property
    def ratio(self) -> float:
        return self.pipeline["time/step"] / self.bare_seconds

    def differences(self) -> list[str]:
        """Where the two sides did not do the same work."""
        ours, theirs = self.pipeline, self.training.values
        found = []
        if ours["rollout/tokens"] != self.generation.tokens:
            found.append(f"tokens: {ours['rollout/tokens']:g} and {self.generation.tokens}")
        for name, mine in (
            ("actor/policy_loss", "policy_loss"),
            ("actor/kl", "kl"),
            ("actor/grad_norm", "grad_norm"),
        ):
            if abs(ours[name] - theirs[mine]) > 1e-4 + 1e-2 * abs(theirs[mine]):
                found.append(f"{mine}: {ours[name]:.6f} and {theirs[mine]:.6f}")
        return found


async def measure(side: Side, vllm: Bare, loop: Bare, vllm_first: bool) -> Pair:
    """The order of the two sides alternates; the bare training needs the rows of the step before
    it."""
    generation = None
    buffer = side.trainer.rollouts.buffer
    ask = [p.token_ids for p in buffer.prompts.peek(buffer.limits.wanted)]
    if vllm_first:
        generation = vllm.ask(ask)
        time.sleep(PAUSE_S)
    ours = await side.step()
    assert [p.token_ids for p in side.prompts] == ask
    time.sleep(PAUSE_S)
    if generation is None:
        generation = vllm.ask(ask)
        time.sleep(PAUSE_S)
    return Pair(ours, generation, loop.ask(side.policy.work()))


async def run(
    args: argparse.Namespace, config: PPOConfig, inputs: Inputs, quiet: QuietPairs[Pair]
) -> None:
    made_of = worker_arguments(config, inputs.device, 1)
    (_, _, spec, *_), (_, actor, *_) = made_of[ENGINES], made_of["actor"]
    vllm = Bare(serve_vllm, spec, args.samples, args.tokens, config.sampling.temperature)
    loop = Bare(serve_torch, config.model.pretrain, actor.optim, args.device)
    try:
        async with pipeline_side(config, inputs) as side:
            vllm.ready()
            loop.ready()
            for vllm_first in quiet:
                quiet.add(await measure(side, vllm, loop, vllm_first))
    finally:
        vllm.close()
        loop.close()


# -- report ----------------------------------------------------------------------------------------


def report(pairs: list[Pair], args: argparse.Namespace, quiet: str) -> str:
    """A Markdown table of medians, then the ratios, then whether both sides did the same work."""

    def ours(name: str) -> list[float]:
        return [p.pipeline[f"time/{name}"] for p in pairs]

    bare = {
        "rollout": [p.generation.seconds for p in pairs],
        "annotate": [p.training.forward_seconds for p in pairs],
        "train": [p.training.update_seconds for p in pairs],
    }
    rest = [p.pipeline["time/step"] - sum(p.pipeline[f"time/{s}"] for s in STAGES) for p in pairs]
    rows = [(stage, ours(stage), bare.get(stage)) for stage in STAGES] + [
        ("credit, metrics, logs", rest, None)
    ]
    rows.append(("step", ours("step"), [p.bare_seconds for p in pairs]))
    step = [p.ratio for p in pairs]
    rollout = [p.generation.seconds / p.pipeline["time/rollout"] for p in pairs]
    training = [p.training.update_seconds / p.pipeline["time/train"] for p in pairs]
    lines = [
        (
            f"{args.prompts} prompts x {args.samples} samples x {args.tokens} tokens, {args.pairs}"
            f" pairs, cores {','.join(map(str, sorted(os.sched_getaffinity(0))))}, torch"
            f" {torch.__version__}"
        ),
        "",
        "| stage | pipeline, s | bare, s |",
        "|---|---|---|",
        *(
            f"| {name} | {spread(mine)} | {spread(theirs) if theirs else ''} |"
            for name, mine, theirs in rows
        ),
        "",
        f"step / bare: {spread(step, 2)}",
        (
            f"tokens/s as a share of bare: rollout {spread(rollout, 2)}, training"
            f" {spread(training, 2)}"
        ),
        quiet,
    ]
    wrong = [
        f"pair {i}: {difference}" for i, p in enumerate(pairs) for difference in p.differences()
    ]
    last = pairs[-1]
    lines += [f"NOT THE SAME WORK: {w}" for w in wrong] or [
        f"same work: {last.generation.tokens} tokens sampled on both sides, in the last pair loss"
        f" {last.pipeline['actor/policy_loss']:.5f} and {last.training.values['policy_loss']:.5f},"
        f" KL {last.pipeline['actor/kl']:.5f} and {last.training.values['kl']:.5f}, gradient norm"
        f" {last.pipeline['actor/grad_norm']:.4f} and {last.training.values['grad_norm']:.4f}"
    ]
    return "\n".join(lines)


def make_task(args: argparse.Namespace, folder: Path) -> None:
    """Countdown prompts, a reward file, and a random model or a link to --pretrain."""
    (folder / "reward.py").write_text(REWARD)
    scripts = ROOT / "examples/python"
    size = ["--hidden_size", args.hidden_size, "--layers", args.layers]
    made: list[list[object]] = [
        [scripts / "countdown/make_data.py", "--output_dir", folder / "data"],
        [scripts / "make_model.py", "countdown", "--output_dir", folder / "model", *size],
    ]
    if args.pretrain:
        made.pop()
        (folder / "model").symlink_to(Path(args.pretrain).resolve())
    for words in made:
        subprocess.run([sys.executable, *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    parser = parser_of(__doc__)
    work_options(parser, prompts=64, samples=8, tokens=24)
    model_options(parser)
    pair_options(parser)
    args = parsed(parser)
    with tempfile.TemporaryDirectory(prefix="openrl_breakdown_") as folder:
        make_task(args, Path(folder))
        quiet: QuietPairs[Pair] = QuietPairs(args.pairs, args.warmup)
        config = config_of(args, Path(folder), quiet.most)
        asyncio.run(run(args, config, prepare(config), quiet))
    print(quiet.verdict() or report(quiet.kept, args, str(quiet)))
    return int(bool(quiet.verdict()) or any(p.differences() for p in quiet.kept))


if __name__ == "__main__":
    sys.exit(main())
