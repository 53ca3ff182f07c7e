"""--full_determinism reaches the kernels, of every command that trains."""

import subprocess
import sys

import pytest

from openrl.config.commands import DPOConfig, RMConfig, SFTConfig
from openrl.trainer import launch_supervised
from openrl.trainer.roles import model_spec, role_models
from openrl.trainer.supervised_tasks import task_of
from tests.flags import PPO, SFT, ppo, settle
from tests.tiny import tiny_tokenizer

USE = """
import torch
from openrl.training.build import compute_deterministically
compute_deterministically()
print(torch.are_deterministic_algorithms_enabled())
"""


@pytest.mark.parametrize("asked", [True, False])
def test_every_trained_model_is_told(asked):
    flag = " --full_determinism" if asked else ""
    config = ppo(PPO + " --init_kl_coef 0.1" + flag)
    specs = [model_spec(config, role, "cpu", 10) for role in role_models(config).values()]
    for command in (SFTConfig, RMConfig, DPOConfig):
        config, _ = settle(command, SFT + flag)
        task = task_of(config, tiny_tokenizer())
        specs.append(launch_supervised.model_spec(config, task, "cpu", 10))
    assert {spec.deterministic for spec in specs} == {asked} and len(specs) >= 5


def test_kernels_are_chosen():
    done = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
