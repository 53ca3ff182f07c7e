"""The flags of the runs in tests/gpu fit together: without a GPU their plan is printed."""

import pytest

from tests.e2e.runs import make_task, plan_of, ppo_flags
from tests.gpu.test_colocated import FLAGS
from tests.gpu.test_runs import CASES, ON_TWO, ONE_GPU, SLEEPS
from tests.tiny import tiny_model_dir, tiny_reward_model_dir


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.mark.parametrize("case", CASES)
def test_one_model(task, tmp_path, case):
    flags = ONE_GPU | CASES[case]
    assert "Weights travel through" in plan_of(ppo_flags(task, tmp_path, **flags))


@pytest.mark.parametrize("case", ON_TWO)
def test_two_gpus(task, tmp_path, case):
    """As many as the test asks for, and the transport that it is about."""
    model = tiny_model_dir(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    plan = plan_of(ppo_flags(task, tmp_path / "out", pretrain=model, **ONE_GPU | ON_TWO[case]))
    apart = case == "an engine apart"
    assert "Placement on cuda: 2 GPUs" in plan
    assert ("NCCL" if apart else "CUDA IPC") in plan.partition("Weights travel through")[2]


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(task, tmp_path, level):
    assert "vllm.cache" in plan_of(ppo_flags(task, tmp_path, vllm_sleep_level=level, **FLAGS))


@pytest.mark.parametrize("sleeps", [{}, SLEEPS], ids=["awake", "asleep"])
def test_critic_and_reward(task, tmp_path, sleeps):
    more = {"advantage_estimator": "gae", "remote_rm_url": None} | sleeps
    judge = tiny_reward_model_dir(tmp_path)
    found = plan_of(ppo_flags(task, tmp_path, **ONE_GPU | more, reward_pretrain=judge))
    assert "critic" in found and "reward" in found
