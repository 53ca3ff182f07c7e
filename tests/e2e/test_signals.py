"""A run of one process is asked to end, and goes on to where it would have ended anyway."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from openrl.trainer.rl_trainer import RLTrainer
from tests.e2e.bench import without_ray
from tests.e2e.runs import SMALL_STEPS, make_task, metrics, ppo_flags, run_here


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
    ("learn", signal.SIGTERM, 143),
    ("report", signal.SIGINT, 130),
    ("evaluate", signal.SIGTERM, 143),
]


@pytest.mark.slow
@pytest.mark.parametrize(("during", "number", "code"), CASES)
def test_a_signal_costs_nothing(whole, tmp_path, monkeypatch, capsys, during, number, code):
    """Heard while a step is learnt, written down or judged: the checkpoint has the step, and the
    resumed run ends with the weights of one that nobody interrupted."""
    task, changes, uninterrupted = whole
    method, heard = getattr(RLTrainer, during), []

    async def interrupted(self, *args):
        if self.step >= 1 and not heard:
            heard.append(os.kill(os.getpid(), number))
        return await method(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(RLTrainer, during, interrupted)
        assert ended_with(task, tmp_path, **changes) == code
    assert "stopped after step 2 of 4" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000002"]
    assert ended_with(task, tmp_path, load_checkpoint=True, **changes) == 0
    expected, found = (load_file(d / "model.safetensors") for d in (uninterrupted, tmp_path))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert [m["step"] for m in metrics(tmp_path)] == [1, 2, 3, 4]
