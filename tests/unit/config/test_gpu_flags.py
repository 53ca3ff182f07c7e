"""The flags of the runs in tests/gpu fit together: without a GPU their plan is printed."""

import pytest

from tests.e2e.runs import make_task, plan_of, ppo_flags
from tests.gpu.test_runs import CASES, ONE_GPU, SLEEPS
from tests.tiny import tiny_reward_model_dir


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.mark.parametrize("case", CASES)
def test_one_model(task, tmp_path, case):
    flags = ONE_GPU | CASES[case]
    assert "Weights travel through" in plan_of(ppo_flags(task, tmp_path, **flags))


@pytest.mark.parametrize("sleeps", [{}, SLEEPS], ids=["awake", "asleep"])
def test_critic_and_reward(task, tmp_path, sleeps):
    more = {"advantage_estimator": "gae", "remote_rm_url": None} | sleeps
    judge = tiny_reward_model_dir(tmp_path)
    found = plan_of(ppo_flags(task, tmp_path, **ONE_GPU | more, reward_pretrain=judge))
    assert "critic" in found and "reward" in found
