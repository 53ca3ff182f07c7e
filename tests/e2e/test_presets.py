"""Every preset on a real model and real data, through the command: accepted, printed, and giving
way to what is typed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from openrl.cli import train_ppo_ray
from openrl.cli.run import command
from openrl.config.commands import PPOConfig
from openrl.config.presets import PRESETS
from openrl.extension_points import advantage_estimators
from openrl.flags.values import show
from tests.e2e.runs import make_task, ppo_flags
from tests.patience import PATIENCE

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def plan(task, tmp_path, capsys):
    """The text of --dry_run; whatever the preset decides is left to it."""

    def plan(**changes):
        free = {"advantage_estimator": None, "generate_max_len": 496, "dry_run": True}
        argv = ppo_flags(task, tmp_path / "out", **(free | changes))
        run = train_ppo_ray.run
        code = command(PPOConfig, train_ppo_ray.prepare, run, argv=argv)
        printed = capsys.readouterr()
        assert code == 0, printed.err
        assert not (tmp_path / "out").exists()
        return printed.out

    return plan


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_makes_a_plan_and_says_what_it_stands_for(plan, name):
    text = plan(algo_preset=name)
    expansion = next(
        line for line in text.splitlines() if line.startswith(f"--algo_preset {name}: ")
    )
    for flag, value in PRESETS[name].items():
        assert f"--{flag} {show(value)}" in expansion
    critic = "values" in advantage_estimators[PRESETS[name]["advantage_estimator"]].needs
    assert ("critic" in text) == critic


def test_a_dry_run_prints_nothing_but_the_plan(task, tmp_path):
    """In a process of its own: what other tests have imported may talk."""
    argv = ppo_flags(
        task, tmp_path / "out", algo_preset="ppo", advantage_estimator=None, dry_run=True
    )
    words = [sys.executable, "-m", "openrl.cli.train_ppo_ray", *argv]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_typed_wins_and_is_shown(plan):
    text = plan(algo_preset="grpo", init_kl_coef=0.5, kl_estimator="k2")
    assert (
        "--kl_estimator 'k2' (instead of 'k3')" in text
        and "--init_kl_coef 0.5 (instead of 0.001)" in text
    )
