"""Running the commands as a user does, on a tiny model and a task that can be learnt in a few
steps."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from openrl.cli import train_ppo_ray
from openrl.cli.run import command
from openrl.config.commands import PPOConfig
from openrl.extension_points import metric_names
from openrl.trace.reader import Trace
from openrl.tracking.metric_rows import row_of
from tests.patience import PATIENCE
from tests.tiny import tiny_model_dir

ROOT = Path(__file__).parents[2]

REWARD = '''
def reward_func(queries, prompts, labels, **kwargs):
    """The share of digits in the response: a policy of random characters can climb it at once."""
    responses = [q[len(p):] for q, p in zip(queries, prompts)]
    shares = [sum(c.isdigit() for c in r) / max(len(r), 1) for r in responses]
    return {"rewards": shares, "scores": shares, "extra_logs": {"digits": shares}}
'''


SMALL_STEPS = {  # two steps of two optimizer steps each, the same numbers in every run
    "full_determinism": True,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "train_batch_size": 4,
    "micro_train_batch_size": 2,
    "micro_rollout_batch_size": 4,
    "max_steps": 2,
}


def make_task(folder: Path, rows: int = 40) -> Path:
    """A model directory, prompts.jsonl and reward.py under ``folder``; returns it."""
    tiny_model_dir(folder).rename(folder / "model")
    records = [{"input": f"{a}+{b}=", "label": str(a + b)} for a in range(10) for b in range(10)][
        :rows
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "reward.py").write_text(REWARD)
    return folder


def ppo_flags(task: Path, out: Path, **changes: object) -> list[str]:
    """Flags of a small GRPO run; ``changes`` replace or add flags, True is a switch, None leaves
    one out."""
    flags: dict[str, object] = {
        "pretrain": task / "model",
        "prompt_data": task / "prompts.jsonl",
        "label_key": "label",
        "remote_rm_url": task / "reward.py",
        "device": "cpu",
        "param_dtype": "fp32",
        "advantage_estimator": "group_norm",
        "n_samples_per_prompt": 4,
        "rollout_batch_size": 8,
        "train_batch_size": 16,
        "micro_train_batch_size": 8,
        "prompt_max_len": 16,
        "generate_max_len": 12,
        "actor_learning_rate": 1e-3,
        "lr_scheduler": "linear",
        "max_steps": 4,
        "save_path": out,
        "ckpt_path": out / "checkpoints",
        "exp_name": "tiny",
    }
    words: list[str] = []
    for name, value in (flags | changes).items():
        if value is None or value is False:
            continue
        values = value if isinstance(value, (list, tuple)) else [value]
        words += [f"--{name}"] if value is True else [f"--{name}", *map(str, values)]
    return words


def start(command: str, flags: list[str], **env: str) -> subprocess.Popen[str]:
    """``python -m openrl.cli.<command>`` in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", f"openrl.cli.{command}", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **env},
        start_new_session=True,
    )


def run(command: str, flags: list[str], code: int = 0, **env: str) -> str:
    """The command's output; fails with it if the exit code is another one."""
    process = start(command, flags, **env)
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == code, f"exit code {process.returncode}, expected {code}:\n{output}"
    return output


def run_here(flags: list[str], train: Callable[[Any, Any], None] = train_ppo_ray.run) -> int:
    """The exit code of train_ppo_ray in this process, which saves its imports; ``train`` may put
    the roles elsewhere than the command does."""
    steps = (train_ppo_ray.prepare, train)
    return command(PPOConfig, *steps, argv=flags)


def plan_of(flags: list[str]) -> str:
    """What train_ppo_ray --dry_run prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run_here([*flags, "--dry_run"]) == 0
    return out.getvalue()


def command_of(script: str, folder: Path, **env: str) -> list[str]:
    """The flags with which a script of examples/scripts would call train_ppo_ray; what it makes
    before, it makes. OUT is ``folder / "out"``."""
    python = folder / "bin/python"  # writes the command's words down, and runs everything else
    python.parent.mkdir(exist_ok=True)
    said = f'printf "%s\\0" "$@" > {folder}/words'
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -m ]; then {said}; else exec {sys.executable} "$@"; fi\n'
    )
    python.chmod(0o700)
    path = {"PATH": f"{python.parent}:{os.environ['PATH']}", "OUT": str(folder / "out")}
    command = ["bash", str(ROOT / f"examples/scripts/{script}.sh")]
    subprocess.run(command, env=os.environ | path | env, check=True)
    run, module, *flags = (folder / "words").read_text().split("\0")[:-1]
    assert (run, module) == ("-m", "openrl.cli.train_ppo_ray")
    return flags


def metrics(out: Path) -> list[dict[str, float]]:
    """The metrics of each step. Fails if the table of metrics does not explain one of them."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    names = {name for record in records for name in record} - {"step", *names_of_others()}
    unknown = sorted(name for name in names if not is_explained(name))
    assert not unknown, f"openrl/tracking/metric_table.py has no row on {unknown}"
    return records


def played(out: Path) -> list[dict[str, Any]]:
    """What the trace keeps of each training step, as ``Trace.trajectory`` returns it: answers, and
    attempts that failed."""
    trace = Trace(out)
    every = (found for step in trace.steps() for found in trace.trajectories(step))
    return [t for t in every if t["tag"] != "evaluation" and t["role"] != "greedy"]


def is_explained(name: str) -> bool:
    """Whether a row explains a metric. That on whatever users' agents report does not count: those of
    these tests report nothing under a name without a namespace."""
    row = row_of(name)
    return row is not None and row.name != "rollout/NAME"


@cache
def names_of_others() -> frozenset[str]:
    return frozenset(there for system in metric_names.entries() for there in system.component)


def untimed(records: list[dict[str, float]]) -> list[dict[str, float]]:
    """What two equal runs have in common."""
    timed = re.compile("time/|timing_s/|perf/|.*_seconds$")
    return [{k: v for k, v in r.items() if not timed.match(k)} for r in records]
