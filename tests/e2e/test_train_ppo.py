"""The main command on the real Ray, DeepSpeed and vLLM: what a run leaves, a resume after a kill,
every role."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from openrl.config.groups.checkpoint import CheckpointFlags
from openrl.trace.reader import Trace
from openrl.trainer.saving.checkpoints import Checkpoints, step_of
from tests.e2e.runs import make_task, metrics, plan_of, ppo_flags, run, run_here, start, untimed
from tests.patience import PATIENCE, still_running


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def whole_run(task, tmp_path_factory) -> tuple[Path, str]:
    """Four steps without interruption, every request seeded."""
    out = tmp_path_factory.mktemp("whole")
    kept = {"rollout_dump_dir": out / "rollouts"}
    return out, run("train_ppo_ray", ppo_flags(task, out, **EXACT, **kept))


EXACT = {
    "full_determinism": True,
    "save_steps": 2,
    "use_kl_loss": True,
    "kl_estimator": "k3",
    "kl_target": 0.1,
}


def test_what_a_run_leaves(whole_run):
    out, output = whole_run
    assert [m["step"] for m in metrics(out)] == [1, 2, 3, 4]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["samples_per_second"] > 0
    assert {"start", "rollout", "train", "sync"} <= summary["seconds_by_stage"].keys()
    assert yaml.safe_load((out / "config.yaml").read_text())["n_samples_per_prompt"] == 4
    assert 'id="table-0"' in (out / "report.html").read_text()
    model = AutoModelForCausalLM.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out)("1+2=").input_ids
    assert model.dtype == torch.float32
    assert "tiny 4/4" in output


def test_the_trace_holds_what_the_metrics_are_made_of(whole_run):
    """Two optimizer steps a training step; the KL has a gradient in every row, so all are
    computed."""
    out, _ = whole_run
    trace = Trace(out)
    rows = trace.index()
    for step, m in enumerate(metrics(out), 1):
        here = [n for n, of_step in enumerate(rows["step"]) if of_step == step]

        def column(name, here=here):
            return np.array([rows[name][n] for n in here], dtype=float)

        tokens = column("trained_tokens")
        assert len(here) == m["rollout/samples"] and tokens.sum() == m["rollout/tokens"]
        assert column("reward").mean() == pytest.approx(m["rollout/reward"], rel=1e-5)
        assert column("gap_max").max() == pytest.approx(m["actor/logprob_gap_max"], rel=1e-4)
        entropy = (column("entropy") * tokens).sum() / tokens.sum()
        assert entropy == pytest.approx(m["actor/entropy"], rel=1e-4)
        clipped = (column("clipped") * tokens).sum() / tokens.sum()
        assert clipped == pytest.approx(m["actor/clip_fraction"], abs=1e-6)
        halves = [column("loss")[half].sum() / tokens[half].sum() for half in halves_of(column)]
        assert np.mean(halves) == pytest.approx(m["actor/policy_loss"], rel=1e-3, abs=1e-6)
    found = trace.trajectory(1, 0)
    (segment,) = found["segments"]
    assert found["text"] == "".join(
        piece for piece, mine in zip(segment["pieces"], segment["loss_mask"], strict=True) if mine
    )
    assert found["engine"] == 0 and found["sampling_seed"] is not None and found["seconds"] > 0


def halves_of(column):
    """Which rows each of the two optimizer steps trained."""
    return [column("optimizer_step") == number for number in (1, 2)]


def test_engine_and_trainer_agree_in_every_step(whole_run):
    assert all(m["actor/logprob_gap_max"] < 1e-4 for m in metrics(whole_run[0]))


def test_the_policy_moves_and_the_engines_follow(whole_run, task):
    out, _ = whole_run
    before, after = (
        load_file(task / "model/model.safetensors"),
        load_file(out / "model.safetensors"),
    )
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert [m["rollout/policy_version_min"] for m in metrics(out)] == [1, 2, 3, 4]


@pytest.mark.full
def test_killed_and_resumed_on_one_place_it_ends_at_the_same_bits(
    ray_address, whole_run, task, tmp_path, capsys
):
    """All roles share one place. The driver is killed (SIGKILL) once step 2 is saved. The resumed
    run, on another cluster, ends as the uninterrupted one did with a place for each role."""
    flags = ppo_flags(task, tmp_path, **EXACT, colocate_all_models=True)
    assert "Placement on cpu: 1 CPU" in plan_of(flags)
    process = start("train_ppo_ray", flags)
    kill_when(process, (tmp_path / "checkpoints/step_000002").exists)
    assert run_here([*flags, "--load_checkpoint", "--ray_address", ray_address]) == 0
    output = capsys.readouterr().out
    # the flags that differ are named
    assert "resumed from" in output and "load_checkpoint" in output and "ray_address" in output
    whole, _ = whole_run
    expected, found = (
        load_file(whole / "model.safetensors"),
        load_file(tmp_path / "model.safetensors"),
    )
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert untimed(metrics(tmp_path)) == untimed(metrics(whole))


@pytest.mark.full
def test_replayed_rollouts_train_the_same_weights(ray_address, whole_run, task, tmp_path):
    """No engine and no reward function runs; a step leaves its profile, its checkpoint a copy."""
    whole, _ = whole_run
    changes = {
        "rollout_replay_dir": whole / "rollouts",
        "profile_tool": "torch",
        "profile_steps": 3,
        "ckpt_upload_dir": tmp_path / "copies",
    }
    flags = ppo_flags(task, tmp_path / "out", **EXACT, **changes)
    plan = plan_of(flags)
    assert "No engine is started" in plan and "\nvllm " not in plan
    assert run_here([*flags, "--ray_address", ray_address]) == 0
    expected, found = (
        load_file(whole / "model.safetensors"),
        load_file(tmp_path / "out/model.safetensors"),
    )
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    pairs = zip(untimed(metrics(tmp_path / "out")), untimed(metrics(whole)), strict=True)
    assert all(ours.items() <= theirs.items() for ours, theirs in pairs), "engines count as well"
    profiles = {path.name for path in (tmp_path / "out/profile/step_3").iterdir()}
    assert profiles == {"actor-0.json.gz", "reference-0.json.gz"}
    checkpoints = Checkpoints(CheckpointFlags(ckpt_path=str(tmp_path / "copies")), {})
    assert [step_of(path) for path in checkpoints.complete()] == [2, 4]


@pytest.mark.full
def test_adapters_share_their_places_with_engines(ray_address, task, tmp_path):
    """LoRA over two ranks of ZeRO 3 that share their places with two engines, with
    OPENRL_FULL_MATRIX=1 with one that is divided (contract/test_rollout_engines.py divides one in
    every run of the suite); the reference is the base itself. Two prompts more than wanted run at a
    time, and the slowest are given up."""
    divided = bool(os.environ.get("OPENRL_FULL_MATRIX"))
    changes = {
        "lora_rank": 4,
        "lora_alpha": 32,
        "use_kl_loss": True,
        "kl_estimator": "k3",
        "colocate_all_models": True,
        "actor_num_gpus_per_node": 2,
        "vllm_tensor_parallel_size": 2 if divided else 1,
        "vllm_generate_batch_size": 10,
        "vllm_max_inflight_per_engine": 9,
        "zero_stage": 3,
        "actor_learning_rate": 1e-2,
        "max_len": 24,
        "generate_max_len": None,
        "max_steps": 3,
        "eval_dataset": task / "prompts.jsonl",
        "eval_steps": 2,
        "eval_max_samples": 6,
        "eval_batch_size": 4,
        "eval_n_samples_per_prompt": 1,
        "eval_generate_max_len": 30,
        "system_envs": "OPENRL_TEST=1",
    }
    plan = plan_of(ppo_flags(task, tmp_path, **changes))
    assert "reference" not in plan
    rows = [line for line in plan.splitlines() if line.startswith("vllm ")]
    row = "vllm 1 1 x 1 0-1 2 x 0.5" if divided else "vllm 2 1 x 2 0-1 0.5"
    assert rows[0].split() == row.split()
    assert run_here(ppo_flags(task, tmp_path, **changes, ray_address=ray_address)) == 0
    records = metrics(tmp_path)
    # it begins as the reference, then leaves it
    assert records[0]["actor/kl"] < 1e-6 < records[2]["actor/kl"]
    # the engines follow: adapters arrive merged; each half of a divided one gets its half of a sync
    assert all(m["actor/logprob_gap_max"] < 1e-4 for m in records)
    assert [m["rollout/surplus_groups"] for m in records] == [2, 2, 2]
    assert [m["rollout/samples"] for m in records] == [32, 32, 32]
    assert records[1]["eval/response_length"] <= 30
    base, merged = (
        load_file(task / "model/model.safetensors"),
        load_file(tmp_path / "model.safetensors"),
    )
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed and all("_proj" in name for name in changed)
    assert (tmp_path / "adapter/adapter_model.safetensors").stat().st_size < (
        tmp_path / "model.safetensors"
    ).stat().st_size


def kill_when(process, happened) -> None:
    """SIGKILL the driver as soon as ``happened()``, then wait until Ray has ended what it
    started."""
    family = psutil.Process(process.pid)
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "the run never got there"
        time.sleep(0.02)  # polling a file of another process
    children = family.children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    # Ray's agents look for their parent now and then
    alive = still_running(children)
    assert not alive, f"left behind: {[p.cmdline()[:3] for p in alive]}"


@pytest.mark.full
def test_every_role_with_two_actor_ranks(ray_address, task, tmp_path):
    """GAE with critic, reference and a reward model as Ray roles; two actor ranks, ZeRO 3, bf16;
    evaluation too."""
    AutoModelForSequenceClassification.from_pretrained(
        task / "model", num_labels=1
    ).save_pretrained(tmp_path / "reward")
    changes = {
        "remote_rm_url": None,
        "reward_pretrain": tmp_path / "reward",
        "advantage_estimator": "gae",
        "n_samples_per_prompt": 1,
        "rollout_batch_size": 16,
        "actor_num_gpus_per_node": 2,
        "critic_num_gpus_per_node": 1,
        "ref_num_gpus_per_node": 1,
        "reward_num_gpus_per_node": 1,
        "vllm_load_format": "dummy",
        "vllm_engine_kwargs": '{"enable_chunked_prefill": true}',
        "zero_stage": 3,
        "param_dtype": "bf16",
        "max_steps": 2,
        "save_hf_ckpt": True,
        "save_steps": 2,
        "adam_offload": True,
        "param_offload": True,
        "enable_ema": True,
        "save_value_network": True,
    }
    assert run_here(ppo_flags(task, tmp_path, **changes, ray_address=ray_address)) == 0
    records = metrics(tmp_path)
    assert AutoModelForSequenceClassification.from_pretrained(f"{tmp_path}_critic").num_labels == 1
    assert [m["step"] for m in records] == [1, 2]
    for name in ("critic/value_loss", "actor/policy_loss", "actor/kl", "rollout/reward"):
        assert all(abs(m[name]) < 100 for m in records), name
    saved = tmp_path / "checkpoints/step_000002"
    assert {"actor", "critic", "hf"} <= {p.name for p in saved.iterdir()}
    assert AutoModelForCausalLM.from_pretrained(saved / "hf").dtype == torch.bfloat16
