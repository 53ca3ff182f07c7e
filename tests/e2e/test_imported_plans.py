"""The configurations of other systems, imported, get a plan on models of the right shapes, with the
numbers that their own code would come to."""

from __future__ import annotations

import json
import re

import pytest

from openrl.cli import import_config, train_ppo_ray
from openrl.cli.run import command
from openrl.config.commands import PPOConfig
from tests.marks import full_after
from tests.tiny import tiny_model_dir
from tests.unit.config.test_importing import COUNTDOWN, ENVS, GRPO, NUMBER_GAME, SOKOBAN

ROW = {
    "problem": "1+1",
    "answer": "2",
    "question": "1+1",
    "labels": "2",
    "data_source": "countdown",
    "prompt": [{"role": "user", "content": "1+1"}],
    "reward_model": {"ground_truth": {"target": 2, "numbers": [1, 1]}},
}
GAME = """
def main(reward_inputs):
    return [{"overall": 1.0} for _ in reward_inputs]

def reward_func(queries, prompts, labels):
    return {"rewards": [1.0] * len(queries)}
"""
ON_GPUS = "--device cuda --ray_address auto --gpu_memory_gb 80 --no_use_wandb --no_use_ms --dry_run"
OPENRLHF = """python3 -m openrlhf.cli.train_ppo_ray --actor.num_nodes 1 --actor.num_gpus_per_node 8 \\
  --ref.num_nodes 1 --ref.num_gpus_per_node 8 --vllm.num_engines 4 --vllm.tensor_parallel_size 2 \\
  --train.colocate_all --vllm.enable_sleep --ds.enable_sleep --rollout.batch_size 128 \\
  --rollout.n_samples_per_prompt 8 --train.batch_size 128 --train.micro_batch_size 8 \\
  --algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3 \\
  --actor.eps_clip_low_high 0.2 0.27 --algo.dynamic_filtering_enable --data.max_len 2048 \\
  --reward.remote_url game.py --data.input_key problem --actor.model_name_or_path m
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model with a chat template, rows of every shape, and what the files name."""
    path = tmp_path_factory.mktemp("imported")
    model = tiny_model_dir(path, max_position_embeddings=8192)
    config = model / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    (path / "rows.jsonl").write_text(f"{json.dumps(ROW)}\n" * 4096)
    (path / "game.py").write_text(GAME)
    (path / "envs.yaml").write_text(ENVS)
    return path, model


SEEDS = {
    # 128 prompts x 5; optimizer steps of 64 prompts x 5
    "EasyR1": (
        "a.yaml",
        NUMBER_GAME.replace("limit_images: 1", "limit_images: 0").replace("@", "_"),
        "",
        "640 2 320",
    ),
    # 64 prompts x 16 in one step; 4 samples on each of 8 GPUs 32 times
    "verl": ("b.sh", COUNTDOWN, "", "1,024 1 1024 32"),
    # 1024 trajectories in one step; 2 samples on each of 8 GPUs 64 times
    "ROLL": ("c.yaml", SOKOBAN, "", "1,024 1 1024 64"),
    # 32 prompts x 8; optimizer steps of 16 prompts x 8; 4 samples on each of 16 GPUs twice
    "MindSpeed-RL": ("d.yaml", GRPO, "--input_key question", "256 2 128 2"),
    # 128 prompts x 8; 128 samples in each optimizer step; 8 on each of 8 GPUs twice
    "OpenRLHF": ("e.sh", OPENRLHF, "", "1,024 8 128 2"),
}


@pytest.mark.parametrize("system", full_after(1, SEEDS))
def test_a_seed_gets_its_plan(system, place, tmp_path, capsys, monkeypatch):
    name, text, changes, numbers = SEEDS[system]
    path, model = place
    monkeypatch.chdir(path)
    (path / name).write_text(text)
    ours = tmp_path / "ours.yaml"
    assert import_config.main([str(path / name), "-o", str(ours)]) == 0
    words = (
        f"--config {ours} --pretrain {model} --save_path {tmp_path}/out --ckpt_path {tmp_path}/ckpt"
    )
    data = "" if "env_tags" in ours.read_text() else "--prompt_data rows.jsonl --prompt_split train"
    data += (
        " --eval_dataset rows.jsonl --eval_split train"
        if "eval_dataset" in ours.read_text()
        else ""
    )
    capsys.readouterr()
    steps = (train_ppo_ray.prepare, train_ppo_ray.run)
    argv = f"{words} {data} {changes} {ON_GPUS}".replace("./game.py", "game.py").split()
    assert command(PPOConfig, *steps, argv=argv) == 0, capsys.readouterr().err
    plan = capsys.readouterr().out
    samples, updates, size, *micro = numbers.split()
    assert re.search(rf"samples per step +{samples} ", plan), plan
    assert re.search(rf"optimizer steps per step +{updates} +of {size} samples", plan), plan
    if micro:
        assert re.search(rf"micro-batches per rank and optimizer step +{micro[0]} ", plan), plan
