"""A run of one process is asked to end, and goes on to where it would have ended anyway."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from openrl.trainer.rl_trainer import RLTrainer
from openrl.training_engine.deepspeed_engine import DeepSpeedEngine
from openrl.workers.model_worker import ModelWorker
from tests.e2e.bench import without_ray
from tests.e2e.runs import SMALL_STEPS, make_task, metrics, ppo_flags, run_here, untimed
from tests.marks import full_after


def ended_with(task: Path, out: Path, **changes: object) -> int:
    flags = SMALL_STEPS | {"rollout_backend": "hf", "max_steps": 4} | changes
    before = signal.getsignal(signal.SIGTERM)
    try:
        return run_here(ppo_flags(task, out, **flags), without_ray)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(task, flags, directory of a run that nobody interrupted)"""
    task = make_task(tmp_path_factory.mktemp("task"))
    changes = {"eval_dataset": task / "prompts.jsonl", "eval_steps": 2, "eval_max_samples": 4}
    out = tmp_path_factory.mktemp("whole")
    assert ended_with(task, out, **changes) == 0
    return task, changes, out


CASES = [
    (ModelWorker, "advance", 1, signal.SIGTERM, 143, 1),  # before the first optimizer step
    (RLTrainer, "report", 1, signal.SIGINT, 130, 2),
    (RLTrainer, "evaluate", 1, signal.SIGTERM, 143, 2),
    (ModelWorker, "forward", 1, signal.SIGTERM, 143, 1),
    (ModelWorker, "forward", 2, signal.SIGTERM, 143, 1),
    (ModelWorker, "advance", 2, signal.SIGTERM, 143, 2),  # ends with both optimizer steps
]
"""Class and method, which of its calls in the second step the signal comes in, the signal, the exit
code, and the step that the checkpoint is of."""


@pytest.mark.parametrize(("kind", "during", "call", "number", "code", "step"), full_after(1, CASES))
def test_a_signal_costs_nothing(
    whole, tmp_path, monkeypatch, capsys, kind, during, call, number, code, step
):
    """The second step takes longer than the grace. Heard before its first optimizer step, it is
    dropped and its answers are kept; later, it is finished. The resumed run ends with the weights
    of one that nobody interrupted."""
    task, changes, uninterrupted = whole
    method, compute, learn = getattr(kind, during), DeepSpeedEngine._run, RLTrainer.learn
    calls: list[bool] = []
    second_step = []

    def interrupted(self, *args):
        if second_step:
            calls.append(True)
            if len(calls) == call:
                os.kill(os.getpid(), number)
        return method(self, *args)

    def slow(self, *args):
        time.sleep(1.0 if second_step else 0.0)
        return compute(self, *args)

    async def learns(self, batch, step, point):
        second_step.extend([True] * (step == 2))
        return await learn(self, batch, step, point)

    with monkeypatch.context() as patched:
        patched.setattr(RLTrainer, "learn", learns)
        patched.setattr(DeepSpeedEngine, "_run", slow)
        patched.setattr(kind, during, interrupted)
        assert ended_with(task, tmp_path, grace_period=6, **changes) == code
    assert f"stopped after step {step} of 4" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [f"step_{step:06d}"]
    assert ended_with(task, tmp_path, load_checkpoint=True, **changes) == 0
    expected, found = (load_file(d / "model.safetensors") for d in (uninterrupted, tmp_path))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert [m["step"] for m in metrics(tmp_path)] == [1, 2, 3, 4]
    if step == 1:  # with the second step nothing was left out, while a signal cuts an evaluation
        assert untimed(metrics(tmp_path)) == untimed(metrics(uninterrupted))
