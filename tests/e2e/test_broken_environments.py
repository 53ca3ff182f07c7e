"""Runs whose environments misbehave in every way: each costs its sample, or its prompt if it always
does, and the run goes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrl.data.environments import environment_prompts
from openrl.extension_points import environments
from tests.e2e.bench import without_ray
from tests.e2e.runs import make_task, metrics, played, ppo_flags, run_here

TAG, SEED = "frail", 42
PROMPTS = environment_prompts({TAG: 1}, 8, SEED, "train")  # of two steps
SEEDS = [prompt.meta["seed"] for prompt in PROMPTS]
BROKEN = SEEDS[5]
FAULTS = dict(zip(SEEDS, ("hang", "die", "shout", "nan", "other"), strict=False))
"""What the first sample of a prompt does in its second turn. The first reset of each seed is that
of the comparison of engine and trainer, before the first step; the second is that sample's."""
GAME = f"""
import os, time

from openrl.extension_points import environments

FAULTS, BROKEN = FAULTS_OF_THE_TEST


@environments.register({TAG!r})
class Frail:
    def reset(self, seed):
        log = os.open(f"{{__file__}}.{{seed}}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.write(log, b"x")
        number = os.lseek(log, 0, os.SEEK_CUR)
        os.close(log)
        self.fault = FAULTS.get(seed) if number == 2 else None
        self.turn = 0
        if seed in BROKEN and number >= BROKEN[seed]:
            raise LookupError("there is no such room")
        return "another" if self.fault == "other" else f"room {{seed}}", {{}}

    def step(self, action):
        self.turn += 1
        reward = sum(c.isdigit() for c in action) / 8
        if self.turn == 2 and self.fault == "hang":
            time.sleep(1000)
        if self.turn == 2 and self.fault == "die":
            os._exit(3)
        if self.turn == 2 and self.fault == "shout":
            return "x" * 10**7, reward, True, False, {{}}
        if self.turn == 2 and self.fault == "nan":
            reward = float("nan")
        if self.turn == 2 and self.fault == "other":
            time.sleep(2)  # not the first of its group to end
        return "on", reward, self.turn == 2, False, {{"success": reward > 0}}
"""
FLAGS = {
    "prompt_data": None,
    "label_key": None,
    "remote_rm_url": None,
    "rollout_backend": "hf",
    "env_tags": [TAG],
    "seed": SEED,
    "max_tokens_per_turn": 6,
    "prompt_max_len": 64,
    "generate_max_len": 60,
    "rollout_batch_size": 4,
    "max_steps": 2,
    "env_step_timeout": 6,
}


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """``make_task``, and the plugin ``frail_game`` with the faults that a test writes into it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    yield make_task(tmp_path)
    environments._entries.pop(TAG, None)
    sys.modules.pop("frail_game", None)


def trained(
    task: Path, faults: dict[int, str], broken: dict[int, int], code: int = 0, **changes: object
) -> list[dict[str, float]]:
    """The metrics of each step. ``broken`` maps seeds to the reset from which on theirs fails."""
    game = GAME.replace("FAULTS_OF_THE_TEST", repr((faults, broken)))
    (task / "frail_game.py").write_text(game)
    flags = FLAGS | {"plugin": "frail_game"} | changes
    assert run_here(ppo_flags(task, task / "out", **flags), without_ray) == code
    return metrics(task / "out") if code == 0 else []


@pytest.mark.full
def test_every_fault_costs_its_sample(task: Path) -> None:
    first, second = trained(task, FAULTS, {BROKEN: 1})
    kinds = ("timeout", "crash", "length", "value")
    assert {kind: first[f"rollout/failures_{kind}"] for kind in kinds} == dict.fromkeys(kinds, 1)
    assert first["rollout/replayed"] == 4 and "rollout/ended_by_environment_error" not in first
    # and a game that can never be played: four samples, each tried twice; three prompts remain
    assert second["rollout/failures_seed"] == 1 and second["rollout/failures_error"] == 8
    assert second["rollout/replayed"] == 5
    assert second["rollout/ended_by_environment_error"] == second["rollout/untrained_samples"] == 4
    assert second["rollout/samples"] == 16 and second["actor/grad_norm"] > 0

    said = [found["failure"] for found in played(task / "out") if found["failure"]]
    assert len(said) == 5 + 8 and all(f"environment {TAG}" in failure for failure in said)
    assert all("seed " in failure and "; actions: " in failure for failure in said)
    assert sum("LookupError: there is no such room" in failure for failure in said) == 8


@pytest.mark.full
def test_a_group_is_complete_without_those_that_hang(task: Path) -> None:
    """Each group has two more environments than samples, and one that hangs without a limit."""
    hang = dict.fromkeys(SEEDS, "hang")
    steps = trained(task, hang, {}, env_group_redundancy=2, env_step_timeout=0)
    assert [(m["rollout/samples"], m["rollout/replayed"]) for m in steps] == [(16, 0)] * 2
    assert not [name for m in steps for name in m if name.startswith("rollout/failures")]


@pytest.mark.full
def test_a_run_ends_when_nothing_can_be_played(task: Path, capsys: pytest.CaptureFixture) -> None:
    """From the first step on, which trains nothing."""
    trained(task, {}, dict.fromkeys(SEEDS, 2), code=1)
    told = capsys.readouterr()
    words = " ".join((told.out + told.err).split())
    assert "no sample of 8 prompts in a row could be played to its end" in words
    assert f"environment {TAG}, seed" in words and "there is no such room" in words
