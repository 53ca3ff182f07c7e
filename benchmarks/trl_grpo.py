"""Training steps of openrl beside those of TRL's GRPOTrainer: samples per second.

    python -m benchmarks.trl_grpo --cores 0
    python -m benchmarks.trl_grpo --cores 0 --hidden_size 512 --layers 10 --flat 0.5

The same model, prompts, reward, group size and learning rate, one optimizer step a rollout, no
reference; one thread per process, ``--cores 0`` puts all of them on one core. openrl samples with
vLLM and computes the prompt of a group once (``--rows``), TRL samples with transformers, as it does
without a GPU. Steps alternate: one side waits while the other works. Prompts have 16 to 64 tokens,
responses a fixed length, so that both sides sample and train the same number of tokens; ``--free``
lets responses end by themselves, which models of random weights do at random. ``--flat 0.5`` gives
all answers to half of the prompts the same reward, so that half of the groups have no gradient."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch; every process started from here inherits it

import torch

from benchmarks.bare import Bare
from benchmarks.options import model_options, pair_options, parsed, parser_of, work_options
from benchmarks.pairs import PAUSE_S, QuietPairs, spread
from benchmarks.step_breakdown import STAGES, Side, config_of, make_task, pipeline_side
from openrl.trainer.planning.prepare import prepare


@dataclass(frozen=True)
class Step:
    """One training step: its seconds, and the tokens of its responses."""

    seconds: float
    tokens: int


@dataclass(frozen=True)
class Work:
    """What both sides are to do in a step."""

    model: str
    prompts: list[str]  # of the whole run, in order
    samples: int  # per prompt
    rows: int  # samples of a step
    tokens: int  # of a response at most
    free: bool  # responses end by themselves
    reward: str  # source of a function with the signature of OpenRLHF's reward files
    learning_rate: float
    device: str


REWARD = '''
def reward_func(queries, prompts, labels, responses, **kwargs):
    """The share of digits; 0.5 for prompts that begin with 0."""
    shares = [sum(c.isdigit() for c in text) / max(len(text), 1) for text in responses]
    return [0.5 if p.startswith("0") else share for p, share in zip(prompts, shares)]
'''


def write_prompts(path: Path, steps: int, prompts: int, flat: float) -> None:
    """Random digits: 16 to 64 of them, a token each. The share ``flat`` of the prompts of each step
    begins with 0, the others with 1."""
    rng, rows = random.Random(0), []
    for i in range(steps * prompts):
        first = "0" if i % prompts < flat * prompts else "1"
        rows.append(first + "".join(rng.choices("0123456789", k=rng.randint(15, 63))))
    path.write_text("".join(json.dumps({"input": row}) + "\n" for row in rows))


# -- TRL -------------------------------------------------------------------------------------------


def trl_settings(work: Work, folder: str) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        use_cpu=work.device == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=work.rows,
        num_generations=work.samples,
        max_completion_length=work.tokens,
        generation_kwargs=None if work.free else {"min_new_tokens": work.tokens},
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        beta=0.0,
        shuffle_dataset=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        log_level="error",
        max_steps=len(work.prompts) * work.samples // work.rows,
        model_init_kwargs={"dtype": torch.float32},
    )


def serve_trl(connection: Connection, work: Work) -> None:
    """Each message but None asks for one training step, answered with a Step; None ends it."""
    torch.set_num_threads(1)
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    sampled, names = [0], {}
    exec(work.reward, names)

    def reward(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        sampled[0] = sum(map(len, completion_ids))
        return names["reward_func"](prompts, prompts, None, completions)

    class OneAtATime(TrainerCallback):
        """Holds the training loop until the next step is asked for."""

        def wait(self, control: Any) -> None:
            if connection.recv() is None:
                control.should_training_stop = True
            self.started = time.perf_counter()

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            connection.send(True)
            self.wait(control)

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            connection.send(Step(time.perf_counter() - self.started, sampled[0]))
            self.wait(control)

    with tempfile.TemporaryDirectory(prefix="trl_") as folder:
        trainer = GRPOTrainer(
            work.model,
            reward,
            trl_settings(work, folder),
            Dataset.from_list([{"prompt": text} for text in work.prompts]),
            processing_class=AutoTokenizer.from_pretrained(work.model),
            callbacks=[OneAtATime()],
        )
        # its figures would mix with ours on the terminal
        trainer.log = lambda *args, **kwargs: None
        trainer.train()


# -- pairs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    ours: Step
    theirs: Step
    passes: int  # of our policy, besides those of its update
    stages: dict[str, float]  # seconds of our step

    @property
    def ratio(self) -> float:
        """Our samples per second to theirs; the samples of a step are as many."""
        return self.theirs.seconds / self.ours.seconds


async def measure(side: Side, trl: Bare, trl_first: bool) -> Pair:
    theirs = trl.ask("step") if trl_first else None
    time.sleep(PAUSE_S)
    side.policy.latest.clear()
    values = await side.step()
    time.sleep(PAUSE_S)
    ours = Step(values["time/step"], int(values["rollout/tokens"]))
    passes, stages = (
        int("columns" in side.policy.latest),
        {name: values[f"time/{name}"] for name in STAGES},
    )
    return Pair(ours, theirs or trl.ask("step"), passes, stages)


async def run(args: argparse.Namespace, folder: Path, quiet: QuietPairs[Pair]) -> None:
    rate = 1e-5
    write_prompts(folder / "prompts.jsonl", quiet.most, args.prompts, args.flat)
    (folder / "reward.py").write_text(REWARD)
    config = config_of(
        args,
        folder,
        quiet.most,
        prompt_data=folder / "prompts.jsonl",
        label_key=None,
        prompt_max_len=64,
        no_shuffle=True,
        use_kl_loss=None,
        kl_estimator=None,
        init_kl_coef=0,
        train_batch_size=args.prompts * args.samples,
        micro_train_batch_size=args.micro,
        actor_learning_rate=rate,
        packing_samples=args.rows == "packed" or None,
        prefix_grouper=args.rows == "shared" or None,
        enable_prefix_caching=True,
        vllm_dtype=args.rollout_dtype,
        enable_vllm_is_correction=args.rollout_dtype != "fp32" or None,
    )
    inputs = prepare(config)
    work = Work(
        config.model.pretrain,
        [prompt.text for prompt in inputs.prompts],
        args.samples,
        args.prompts * args.samples,
        args.tokens,
        args.free,
        REWARD,
        rate,
        args.device,
    )
    trl = Bare(serve_trl, work)
    try:
        async with pipeline_side(config, inputs, ignore_eos=not args.free) as side:
            trl.ready()
            for trl_first in quiet:
                quiet.add(await measure(side, trl, trl_first))
    finally:
        trl.close()


# -- report ----------------------------------------------------------------------------------------


def report(pairs: list[Pair], args: argparse.Namespace, parameters: int, quiet: str) -> str:
    rows = args.prompts * args.samples
    sides = (("openrl", [p.ours for p in pairs]), ("TRL", [p.theirs for p in pairs]))
    ratios = [p.ratio for p in pairs]
    import trl

    return "\n".join(
        [
            (
                f"{parameters / 1e6:.1f}M parameters, {args.prompts} prompts x {args.samples}"
                f" samples x {'at most ' if args.free else ''}{args.tokens} tokens, {args.flat:.0%}"
                f" of groups flat, rollouts in {args.rollout_dtype}, {args.pairs} pairs, cores"
                f" {','.join(map(str, sorted(os.sched_getaffinity(0))))}, torch"
                f" {torch.__version__}, TRL {trl.__version__}"
            ),
            "",
            "| | step, s | samples/s | response tokens of a step |",
            "|---|---|---|---|",
            *(
                f"| {name} | {spread([s.seconds for s in steps])} |"
                f" {rows / median(s.seconds for s in steps):.1f} |"
                f" {median(s.tokens for s in steps):.0f} |"
                for name, steps in sides
            ),
            "",
            "openrl's stages: "
            + ", ".join(f"{name} {median(p.stages[name] for p in pairs):.2f} s" for name in STAGES),
            f"samples/s, openrl to TRL: {spread(ratios, 2)}",
            (
                f"forward passes of the policy besides its update: {sum(p.passes for p in pairs)};"
                " no reference model"
            ),
            quiet,
        ]
    )


def main() -> int:
    parser = parser_of(__doc__)
    work_options(parser, prompts=8, samples=4, tokens=64)
    parser.add_argument(
        "--free", action="store_true", help="responses end by themselves, at --tokens at the latest"
    )
    model_options(parser, hidden_size=256, layers=5)
    parser.add_argument(
        "--flat", type=float, default=0.0, help="share of prompts whose answers get equal rewards"
    )
    parser.add_argument(
        "--rollout_dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="of openrl's engine; bf16 comes with its correction",
    )
    parser.add_argument(
        "--micro",
        type=int,
        default=8,
        help="rows of a micro-batch of openrl; TRL's is the whole step",
    )
    ways = "of openrl: padded, --packing_samples, or --prefix_grouper"
    parser.add_argument(
        "--rows", choices=("padded", "packed", "shared"), default="shared", help=ways
    )
    pair_options(parser)
    args = parsed(parser)
    with tempfile.TemporaryDirectory(prefix="openrl_trl_") as name:
        make_task(args, Path(name))
        quiet: QuietPairs[Pair] = QuietPairs(args.pairs, args.warmup)
        asyncio.run(run(args, Path(name), quiet))
        from safetensors import safe_open

        with safe_open(Path(name) / "model/model.safetensors", "pt") as stored:
            parameters = sum(stored.get_tensor(key).numel() for key in stored.keys())  # noqa: SIM118
    print(quiet.verdict() or report(quiet.kept, args, parameters, str(quiet)))
    return int(bool(quiet.verdict()))


if __name__ == "__main__":
    sys.exit(main())
