"""Two ranks that hold every sequence together, through the commands: the run of one rank."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from openrl.cli import train_sft
from openrl.cli.run import command
from openrl.config.commands import SFTConfig
from tests.e2e.bench import without_ray
from tests.e2e.runs import make_task, metrics, ppo_flags, run_here
from tests.patience import PATIENCE
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full


def test_answers_are_trained_on_by_two_ranks_of_a_ring(tmp_path):
    """train_sft under torchrun; a ring packs, and says so."""
    model = tiny_model_dir(tmp_path)
    rows = [
        {"input": f"{a}+{b}=", "output": str(a + b) * (a + 1)} for a in range(5) for b in range(5)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))

    def flags(out, *more):
        words = f"""--pretrain {model} --dataset {tmp_path}/rows.jsonl --output_key output --max_len 64 --max_steps 3
            --train_batch_size 8 --micro_train_batch_size 4 --learning_rate 3e-3 --param_dtype fp32 --device cpu
            --eval_dataset {tmp_path}/rows.jsonl --eval_split train --eval_steps 3 --save_path {out}"""
        return [*words.split(), *more]

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    launcher = (
        f"-m torch.distributed.run --nproc_per_node 2 --master_addr 127.0.0.1 --master_port {port}"
    )
    words = [
        *launcher.split(),
        "-m",
        "openrl.cli.train_sft",
        *flags(tmp_path / "ring", "--ring_attn_size", "2"),
    ]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each sequence is split over 2 ranks by ring attention" in done.stdout
    assert "--ring_attn_size turns --packing_samples on" in done.stdout
    assert command(SFTConfig, train_sft.prepare, train_sft.run, argv=flags(tmp_path / "one")) == 0
    for split, whole in zip(metrics(tmp_path / "ring"), metrics(tmp_path / "one"), strict=True):
        for name in ("loss", "grad_norm", *(["eval/loss"] if "eval/loss" in whole else [])):
            assert split[name] == pytest.approx(whole[name], rel=1e-4), name


def test_a_policy_is_trained_by_two_ranks_of_ulysses(ray_address, tmp_path, capsys):
    """Actor and reference of train_ppo_ray on Ray, two steps: the same rows, answers and gradients
    as of one rank each."""
    task = make_task(tmp_path)
    small = {
        "rollout_backend": "hf",
        "full_determinism": True,
        "max_steps": 2,
        "rollout_batch_size": 4,
    }
    two = {"actor_num_gpus_per_node": 2, "ulysses_size": 2, "ray_address": ray_address}
    assert run_here(ppo_flags(task, tmp_path / "two", **small, **two)) == 0
    assert "each sequence is split over 2 ranks by Ulysses" in capsys.readouterr().out
    assert run_here(ppo_flags(task, tmp_path / "one", **small), without_ray) == 0
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert two["rollout/reward"] == one["rollout/reward"]
        for name in (
            "actor/policy_loss",
            "actor/kl",
            "actor/entropy",
            "actor/grad_norm",
            "actor/logprob_gap",
        ):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
