"""Rollouts beside training, and answers that outlive a step: the real loop over real processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from openrl.config.groups.placement import ENGINES
from tests.e2e.bench import Bench, started
from tests.e2e.runs import make_task, metrics, played, ppo_flags, run, start, untimed
from tests.patience import PATIENCE, still_running

pytestmark = pytest.mark.full


SMALL = {
    "rollout_backend": "hf",
    "rollout_batch_size": 4,
    "train_batch_size": 8,
    "micro_train_batch_size": 4,
    "generate_max_len": 24,
    "max_steps": 5,
    "lr_warmup_ratio": 0,
    "enable_vllm_is_correction": True,
    "trace_sample_rate": 1,
}
WAITS = ("rollout/trainer_wait_seconds", "rollout/engine_wait_seconds")


class Cases(Bench):
    def __call__(self, out: Path, **changes: object) -> list[dict[str, float]]:
        try:
            return super().__call__(out, **changes)
        finally:  # a run leaves its engines paused if it ends with answers under way
            self.runner.run(self.groups[ENGINES].call("resume", False))


@pytest.fixture(scope="module")
def bench(ray_address, tmp_path_factory):
    """One engine, policy, critic and reference, each in a process of its own."""
    task = make_task(tmp_path_factory.mktemp("task"), rows=100)
    out = tmp_path_factory.mktemp("start")
    flags = {"advantage_estimator": "gae", "full_determinism": True, "ray_address": ray_address}
    with started(task, out, **(SMALL | flags)) as alive:
        yield Cases(alive.runner, task, alive.groups, alive.residency)


def prompts_of_steps(out: Path) -> list[list[str]]:
    """Prompts that each step trained on or turned down, in their order."""
    steps: dict[int, dict[str, None]] = {}
    for trajectory in played(out):
        steps.setdefault(trajectory["step"], {})[trajectory["prompt_id"]] = None
    return [list(steps[number]) for number in sorted(steps)]


@pytest.mark.parametrize("estimator", ["group_norm", "gae"])
def test_without_staleness_an_asynchronous_run_is_the_on_policy_run_bit_for_bit(
    bench, tmp_path, estimator
):
    exact = SMALL | {"full_determinism": True, "advantage_estimator": estimator, "max_steps": 3}
    bench(tmp_path / "on_policy", **exact)
    bench(tmp_path / "async", **exact, async_train=True, max_staleness=0)
    expected, found = (
        load_file(tmp_path / name / "model.safetensors") for name in ("on_policy", "async")
    )
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    on_policy, asynchronous = (
        [{k: v for k, v in record.items() if k not in WAITS} for record in untimed(metrics(out))]
        for out in (tmp_path / "on_policy", tmp_path / "async")
    )
    assert on_policy == asynchronous


CASES = {
    "a step ahead": {"async_train": True},
    "two steps ahead, gae": {
        "async_train": True,
        "async_queue_size": 2,
        "advantage_estimator": "gae",
    },
    "interrupted": {"async_train": True, "partial_rollout": True},
    "dropped": {
        "async_train": True,
        "async_queue_size": 3,
        "max_staleness": 1,
        "staleness_policy": "drop",
    },
    "masked": {
        "async_train": True,
        "partial_rollout": True,
        "async_queue_size": 3,
        "max_staleness": 1,
        "staleness_policy": "mask",
    },
    "filtered": {
        "async_train": True,
        "dynamic_filtering": True,
        "dynamic_filtering_reward_range": (0.01, 0.99),
    },
    "carried over": {"partial_rollout": True, "oversample_ratio": 2},
    "every second step": {"async_train": True, "weight_sync_interval": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_no_trained_token_is_too_old(bench, tmp_path, name):
    flags = {"advantage_estimator": "group_norm"} | CASES[name]
    steps = bench(tmp_path, **(SMALL | flags))
    bound = flags.get("max_staleness", flags.get("async_queue_size", 1))
    assert [m["step"] for m in steps] == [1, 2, 3, 4, 5]
    assert all(m["rollout/age_max"] <= bound for m in steps)
    assert any(m["rollout/age_max"] > 0 for m in steps), "nothing ran ahead"
    assert all(m["rollout/samples"] >= 16 for m in steps)
    assert not any(m["rollout/failure_rate"] for m in steps if "rollout/failure_rate" in m)
    if flags.get("staleness_policy", "wait") == "wait":
        assert not any(m["rollout/dropped_groups"] or m["rollout/masked_share"] for m in steps)
    trained = [prompt for step in prompts_of_steps(tmp_path) for prompt in step]
    assert len(trained) == len(set(trained)), "a prompt was trained on twice within a pass"


def test_evaluation_beside_rollouts_is_of_one_version(bench, tmp_path):
    flags = {"async_train": True, "partial_rollout": True, "eval_steps": 2}
    evaluated = {"eval_dataset": bench.task / "prompts.jsonl", "eval_max_samples": 6}
    steps = bench(tmp_path, **(SMALL | flags | evaluated))
    versions = {m["step"]: m["eval/policy_version"] for m in steps if "eval/policy_version" in m}
    assert versions == {2: 3, 4: 5, 5: 6}  # the first sync is version 1


KILLS = 20 if os.environ.get("OPENRL_FULL_MATRIX") else 1


def test_killed_and_interrupted_at_any_moment_a_run_goes_on_with_the_same_prompts(
    ray_address, bench, tmp_path
):
    """SIGKILL of the driver at random moments, then SIGTERM in mid-step, with answers under way:
    every step is trained on the prompts of the uninterrupted run, in their order. SIGTERM leaves
    a checkpoint and no process."""
    settings = SMALL | {"advantage_estimator": "group_norm", "save_steps": 1}
    settings |= {"async_train": True, "async_queue_size": 2, "max_steps": 12 + 4 * KILLS}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    bench(whole, **settings)
    words, moments = ppo_flags(bench.task, cut, **settings, load_checkpoint=True), random.Random(7)
    joined = [*words, "--ray_address", ray_address]
    for _ in range(KILLS):
        process = one_step_later(joined, cut)
        time.sleep(moments.random() * 2)  # any moment of the steps that follow
        assert process.poll() is None, f"it ended before it was killed:\n{process.stdout.read()}"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    process = one_step_later(words, cut)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, output
    assert "SIGTERM: stopped after step" in output, output
    assert not still_running(children)
    assert "resumed from" in run("train_ppo_ray", joined)
    assert prompts_of_steps(cut) == prompts_of_steps(whole)


def one_step_later(words: list[str], out: Path) -> subprocess.Popen[str]:
    """The run with these flags, started, once it has trained a step. A resume first cuts the log
    back to its checkpoint."""
    process, steps_before = start("train_ppo_ray", words), steps_in(out)
    deadline = time.monotonic() + PATIENCE
    while steps_in(out) <= steps_before:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "no step in a long time"
        time.sleep(0.05)  # polling a file of another process
    return process


def steps_in(out: Path) -> int:
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0
