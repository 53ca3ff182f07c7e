"""Everything on one place with every kind of sleep, on the real Ray, DeepSpeed and vLLM: the same
bits as without. ``tests/contract/test_sleeping_runs.py`` has the order."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from openrl.workers.residency import Residency
from tests.e2e.bench import started
from tests.e2e.runs import SMALL_STEPS, make_task, untimed

pytestmark = pytest.mark.full

TOGETHER = {
    "colocate_all_models": True,
    "advantage_estimator": "gae",
    "ref_pretrain": None,
    "init_kl_coef": 0.1,
    **SMALL_STEPS,
    "generate_max_len": 8,
    "param_dtype": "bf16",
    "lr_warmup_ratio": 0,
    "save_steps": 1,
}
ASLEEP = {
    "vllm_enable_sleep": True,
    "deepspeed_enable_sleep": True,
    "deepspeed_sleep_states": ("param", "optim", "grad"),
    "ref_reward_offload": True,
    "log_memory": True,
}


def test_sleep_changes_no_bit(ray_address, tmp_path, capsys):
    task = make_task(tmp_path)
    flags = {**TOGETHER, **ASLEEP, "ray_address": ray_address}
    with started(task, tmp_path / "start", **flags) as bench:
        capsys.readouterr()
        slept = bench(tmp_path / "slept", **TOGETHER, **ASLEEP)
        shown = capsys.readouterr().out
        shutil.copytree(
            tmp_path / "slept/checkpoints/step_000001", tmp_path / "again/checkpoints/step_000001"
        )
        again = bench(tmp_path / "again", **TOGETHER, **ASLEEP, load_checkpoint=True)
        wake_all(bench)
        stayed = bench(tmp_path / "stayed", **TOGETHER)
    assert untimed(slept) == untimed(stayed)
    assert untimed(again) == untimed(slept)[1:]
    for name in ("model.safetensors", "checkpoints/step_000002/actor/rank_00000.safetensors"):
        asleep, awake, resumed = (
            load_file(tmp_path / run / name) for run in ("slept", "stayed", "again")
        )
        assert asleep.keys() == awake.keys() == resumed.keys()
        assert all(
            torch.equal(t, awake[n]) and torch.equal(t, resumed[n]) for n, t in asleep.items()
        )
    moved = [shown.count(f"memory after {direction} ") for direction in ("sleep", "wake")]
    assert min(moved) > 8  # two steps that each move four roles and more
    assert {"perf/sleep_seconds", "perf/wake_seconds", "perf/memory_host_gib"} <= slept[-1].keys()
    assert not {"perf/sleep_seconds", "perf/memory_host_gib"} & stayed[-1].keys()


def wake_all(bench) -> None:
    """Leave the processes as those of a run whose flags let nobody sleep."""
    rows, awake = bench.residency.table.rows, bench.residency.awake
    for role in ("vllm",):  # models start anew with each run
        parts = [tenant.part for tenant in rows if tenant.role == role and tenant not in awake]
        bench.runner.run(bench.groups[role].call("wake", *parts))
    bench.residency = Residency()
