"""Whole runs on one GPU: adapters sent merged and as adapters, experts, a critic and a reward model,
parameters that sleep, and a colocation with little room. On two: NCCL between ranks and to engines,
and what is divided among them."""

from __future__ import annotations

import gc

import pytest
import torch

from openrl.models.process_memory import freeze_gc_heap
from tests.e2e.runs import make_task, metrics, ppo_flags, run
from tests.tiny import tiny_model_dir, tiny_reward_model_dir

GIB, GPUS = 2**30, torch.cuda.device_count()
ONE_GPU = {
    "device": "cuda",
    "param_dtype": "bf16",
    "actor_num_gpus_per_node": 1,
    "actor_learning_rate": 1e-5,
    "colocate_all_models": True,
    "vllm_gpu_memory_utilization": 0.3,
    "max_steps": 2,
}
SLEEPS = {
    "vllm_enable_sleep": True,
    "deepspeed_enable_sleep": True,
    "deepspeed_sleep_states": ["param", "optim", "grad"],
    "ref_reward_offload": True,
}
CASES = {
    "adapters, merged": {"lora_rank": 8, "lora_sync": "merge"},
    "adapters, as adapters": {"lora_rank": 8, "lora_sync": "adapter"},
    "4-bit weights": {"lora_rank": 8, "load_in_4bit": True},
    "8-bit optimizer": {"optimizer": "adamw_8bit"},
    "states on the host": {"zero_stage": 2, "adam_offload": True},
    "parameters asleep": SLEEPS,
    "packed": {"packing_samples": True},
}
RANKS = {"actor_num_gpus_per_node": 2}
ON_TWO = {
    "an engine apart": {
        "colocate_all_models": False,
        "colocate_actor_ref": True,
        "vllm_num_engines": 1,
    },
    "ZeRO 2": RANKS,
    "ZeRO 3, asleep": RANKS | SLEEPS | {"zero_stage": 3},
    "an engine of two": RANKS | {"zero_stage": 3, "vllm_tensor_parallel_size": 2},
    "heads divided": RANKS | {"ulysses_size": 2},
    "a ring": RANKS | {"ring_attn_size": 2, "packing_samples": True},
    "layers divided": RANKS | {"ds_tensor_parallel_size": 2, "zero_stage": 1},
}


def trained(tmp_path, record_property, gap=0.02, **flags):
    """Two steps, each with a look at the gap between engine and trainer."""
    task = make_task(tmp_path)
    run("train_ppo_ray", ppo_flags(task, tmp_path / "out", **ONE_GPU | flags))
    steps = metrics(tmp_path / "out")
    assert [m["step"] for m in steps] == [1, 2]
    for m in steps:
        assert m["actor/nonfinite_steps"] == 0 and m["actor/logprob_gap"] < gap
    last = steps[-1]
    record_property("mean gap of log-probs", last["actor/logprob_gap"])
    for name in ("perf/tokens_per_second", "time/rollout", "time/train", "time/sync"):
        if name in last:
            record_property(name, last[name])
    return steps


@pytest.mark.parametrize("case", CASES)
def test_two_steps(tmp_path, model_dir, record_property, case):
    trained(tmp_path, record_property, pretrain=model_dir, **CASES[case])


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", ON_TWO)
def test_two_steps_on_two_gpus(tmp_path, model_dir, record_property, case):
    trained(tmp_path, record_property, pretrain=model_dir, **ON_TWO[case])


def test_experts(tmp_path, record_property):
    """bf16 engines choose another expert here and there: the gap may be wider."""
    shape = {"hidden_size": 512, "num_hidden_layers": 4, "num_experts": 16, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "initializer_range": 0.02}
    model = tiny_model_dir(
        tmp_path, arch="qwen3_moe", tied=False, dtype=torch.bfloat16, **shape, **heads
    )
    steps = trained(tmp_path / "run", record_property, gap=0.05, pretrain=model, aux_loss_coef=0.01)
    assert all(m["actor/aux_loss"] > 0 for m in steps)


@pytest.mark.parametrize("sleeps", [{}, SLEEPS], ids=["awake", "asleep"])
def test_a_critic_and_a_reward_model(tmp_path, model_dir, record_property, sleeps):
    judge = tiny_reward_model_dir(tmp_path / "judge")
    steps = trained(
        tmp_path / "run",
        record_property,
        pretrain=model_dir,
        advantage_estimator="gae",
        remote_rm_url=None,
        reward_pretrain=judge,
        **sleeps,
    )
    assert all(m["critic/nonfinite_steps"] == 0 for m in steps)


def test_a_colocation_with_little_room(tmp_path, model_dir, record_property):
    """Everything but 16 GiB of the GPU is taken: engine and actor fit in turns alone, and what one
    keeps is missing to the other."""
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(max(free - 16 * GIB, 0), dtype=torch.uint8, device="cuda")
    share = 10 * GIB / torch.cuda.get_device_properties(0).total_memory
    flags = SLEEPS | {"vllm_gpu_memory_utilization": round(share, 4), "log_memory": True}
    try:
        trained(tmp_path, record_property, pretrain=model_dir, micro_train_batch_size=16, **flags)
    finally:
        del taken
        gc.unfreeze()
        freeze_gc_heap()
        torch.cuda.empty_cache()
