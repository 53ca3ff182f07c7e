"""A mixture of experts in bf16 through the main command: the trainer replays the experts that its
engine chose for prompts, siblings with a common beginning and packed rows."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.bench import without_ray
from tests.e2e.runs import make_task, metrics, ppo_flags, run_here
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full

FLAGS = {
    "rollout_backend": "hf",
    "param_dtype": "bf16",
    "full_determinism": True,
    "rollout_batch_size": 4,
    "train_batch_size": 8,
    "micro_train_batch_size": 4,
    "generate_max_len": 24,
    "prefix_grouper": True,
    "gradient_checkpointing": True,
    "zero_stage": 2,
    "lr_warmup_ratio": 0,
    "max_steps": 2,
}


def test_replay_leaves_less_of_the_gap(tmp_path):
    """Of 32 experts several are about equally good, so that bf16 decides which are taken."""
    task = make_task(tmp_path)
    experts = {"num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 4}
    model = tiny_model_dir(tmp_path, arch="qwen3_moe", tied=False, dtype=torch.bfloat16, **experts)
    steps = {}
    for replay in (False, True):
        out = tmp_path / str(replay)
        flags = FLAGS | {"pretrain": model, "routing_replay": replay}
        assert run_here(ppo_flags(task, out, **flags), without_ray) == 0
        steps[replay] = metrics(out)
    assert [m["step"] for m in steps[True]] == [1, 2]
    plain, replayed = (sum(m["mismatch/k3_kl"] for m in steps[replay]) for replay in (False, True))
    assert replayed < plain / 2
    for m in steps[True]:
        assert m["rollout/routes_unknown"] == 0
        assert m["actor/nonfinite_steps"] == 0 and m["actor/grad_norm"] > 0
        assert 0 < m["mismatch/bitwise_frac"] < 1
    assert not any("rollout/routes_unknown" in m for m in steps[False])
