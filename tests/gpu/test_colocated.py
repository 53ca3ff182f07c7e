"""A whole run on one GPU that holds everything, both kinds of sleep on: two steps, memory at each
edge, the gap of log-probs."""

from __future__ import annotations

import itertools
import re

import pytest

from tests.e2e.runs import make_task, metrics, ppo_flags, run

FLAGS = {
    "device": "cuda",
    "param_dtype": "bf16",
    "actor_num_gpus_per_node": 1,
    "actor_learning_rate": 1e-5,
    "colocate_all_models": True,
    "vllm_enable_sleep": True,
    "deepspeed_enable_sleep": True,
    "ref_reward_offload": True,
    "vllm_gpu_memory_utilization": 0.3,
    "log_memory": True,
    "max_steps": 2,
    "save_steps": 1,
}
EDGE = re.compile(r"memory after (?P<edge>[^|]+?) \|.*?(?P<free>[\d.]+) free")


@pytest.mark.parametrize("level", [1, 2])
def test_two_steps_with_both_sleeps(tmp_path, model_dir, record_property, level):
    flags = ppo_flags(
        make_task(tmp_path), tmp_path / "out", pretrain=model_dir, vllm_sleep_level=level, **FLAGS
    )
    edges = [
        (found["edge"], float(found["free"]))
        for found in EDGE.finditer(run("train_ppo_ray", flags))
    ]
    steps = metrics(tmp_path / "out")
    assert [m["step"] for m in steps] == [1, 2]
    for m in steps:
        record_property(
            f"log-prob gap, mean and most, step {m['step']:.0f}",
            f"{m['actor/logprob_gap']:.4f}, {m['actor/logprob_gap_max']:.4f}",
        )
        record_property(
            f"seconds sleeping and waking, step {m['step']:.0f}",
            f"{m['perf/sleep_seconds']:.2f}, {m['perf/wake_seconds']:.2f}",
        )
        assert m["actor/nonfinite_steps"] == 0 and m["actor/logprob_gap"] < 0.02
        # after the first check, and after the checkpoint of step 1
        assert m.get("sync/resent", 0) == level - 1
    for edge, free in edges:
        record_property(f"free GiB after {edge}", free)
    rises = [(edge, now - before) for (_, before), (edge, now) in itertools.pairwise(edges)]
    assert min(rise for edge, rise in rises if edge.startswith("sleep vllm.cache")) > 1
    states = [
        rise
        for edge, rise in rises
        if edge.startswith("sleep actor.grad") and "for start" not in edge
    ]
    assert min(states) > 1.5  # masters and moments of 200 million parameters
