"""--full_determinism reaches the kernels, of every command that trains."""

import os

import pytest
import torch

from openrl.config.commands import DPOConfig, RMConfig, SFTConfig
from openrl.trainer.supervised import launch as launch_supervised
from openrl.trainer.supervised.tasks import task_of
from openrl.training_engine.build import compute_deterministically
from openrl.workers.roles import model_specs
from tests.flags import PPO, SFT, ppo, settle
from tests.tiny import tiny_tokenizer


@pytest.mark.parametrize("asked", [True, False])
def test_every_trained_model_is_told(asked):
    flag = " --full_determinism" if asked else ""
    config = ppo(PPO + " --init_kl_coef 0.1" + flag)
    specs = [spec for (spec,) in model_specs(config, "cpu", 10).values()]
    for command in (SFTConfig, RMConfig, DPOConfig):
        config, _ = settle(command, SFT + flag)
        task = task_of(config, tiny_tokenizer())
        specs.append(launch_supervised.trained_spec(config, task, "cpu", 10))
    assert {spec.deterministic for spec in specs} == {asked} and len(specs) >= 5


def test_kernels_are_chosen(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    try:
        compute_deterministically()
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled
