"""On-policy distillation through the command: a policy without any reward approaches its teacher."""

from __future__ import annotations

import pytest

from tests.e2e.bench import without_ray
from tests.e2e.runs import make_task, metrics, ppo_flags, run_here
from tests.marks import full_after
from tests.tiny import tiny_model_dir

TAUGHT = {
    "rollout_backend": "hf",
    "remote_rm_url": None,
    "label_key": None,
    "advantage_estimator": "reinforce",
    "init_kl_coef": 0,
    "full_determinism": True,
    "temperature": 0.8,
    "rollout_batch_size": 4,
    "train_batch_size": 16,
    "micro_train_batch_size": 16,
    "max_steps": 8,
    "lr_warmup_ratio": 0,
    "actor_learning_rate": 1e-2,
}
MODES = {
    "advantage": {},
    "reverse_kl": {"teacher_topk": 5},
    "forward_kl": {"teacher_topk": 0},
    "jsd": {"packing_samples": True},
}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    return tiny_model_dir(folder, seed=3, initializer_range=0.2)


@pytest.mark.parametrize("mode", full_after(1, MODES))
def test_a_policy_without_rewards_approaches_its_teacher(task, teacher, tmp_path, mode):
    changes = TAUGHT | {"teacher_pretrain": teacher, "teacher_mode": mode} | MODES[mode]
    assert run_here(ppo_flags(task, tmp_path, **changes), without_ray) == 0
    steps = metrics(tmp_path)
    name = "actor/teacher_kl" if mode == "advantage" else "actor/teacher_loss"
    distances = [step[name] for step in steps]
    assert not any(
        "rollout/reward" in step or "rollout/zero_variance_groups" in step for step in steps
    )
    assert sum(distances[-2:]) < 0.9 * sum(distances[:2]), distances
