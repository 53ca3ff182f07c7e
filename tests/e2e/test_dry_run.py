"""What the start would refuse, --dry_run refuses: each was once found half a minute later, by a
traceback."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, BertConfig, BertForMaskedLM

from openrl.cli import train_ppo_ray
from openrl.cli.run import command
from openrl.config.commands import PPOConfig
from tests.e2e.runs import make_task, plan_of, ppo_flags


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def refused(task, tmp_path, capsys):
    def refused(**changes: object) -> str:
        """What the command says; it starts nothing, and has no traceback."""
        argv = [*ppo_flags(task, tmp_path / "out", **changes), "--dry_run"]
        steps = (train_ppo_ray.prepare, train_ppo_ray.run)
        try:
            code = command(PPOConfig, *steps, argv=argv)
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr().err
        assert code == 2, said
        return said

    return refused


def write(name, content):
    return lambda model: (model / name).write_bytes(content)


def change_config(**fields):
    def change(model):
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def cut(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-500])


def drop(model):
    path = model / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("model.layers.0.mlp.gate_proj.weight")
    save_file(tensors, path, metadata={"format": "pt"})


def a_bert(model):
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, is_decoder=True)
    BertForMaskedLM(config).save_pretrained(model)


def a_reward_model(model):
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(model)


MODELS = {
    "empty": (write("model.safetensors", b""), "model.safetensors is empty"),
    "cut": (cut, "bytes instead of"),
    "garbage": (write("model.safetensors", b"x" * 5000), "is not a safetensors file"),
    "vocabulary": (change_config(vocab_size=73), "has the shape"),
    "width": (change_config(hidden_size=128), "has the shape"),
    "layers": (change_config(num_hidden_layers=3), "its config does not load"),
    "a tensor less": (drop, "1 weights missing, e.g. model.layers.0.mlp.gate_proj.weight"),
    "bert": (a_bert, "is a BertForMaskedLM, which writes no text"),
    "reward model": (a_reward_model, "ForSequenceClassification, which writes no text"),
    "generation": (
        write("generation_config.json", b'{"do_sample": false, "temperature": 0.5}'),
        "its generation_config.json cannot be saved with the trained model",
    ),
    "no JSON": (write("config.json", b"{"), "config.json is not JSON"),
    "unknown": (change_config(model_type="nosuch"), "does not know its architecture"),
    "shard gone": (
        write("model.safetensors.index.json", b'{"weight_map": {"a": "b.safetensors"}}'),
        "1 of its files missing, e.g. b.safetensors",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_be_loaded(refused, task, tmp_path, case):
    spoil, words = MODELS[case]
    model = shutil.copytree(task / "model", tmp_path / "model")
    spoil(model)
    said = refused(pretrain=model)
    assert words in said and "try: " in said
    assert said.count(words) == 1, "one cause is told once"


def test_a_reward_model_without_a_head(refused, task):
    said = refused(remote_rm_url=None, reward_pretrain=task / "model")
    assert "has no weights named score.weight, so it is not a reward model" in said


FLAGS = {
    "seed": ({"seed": 4294967296}, "--seed: must be"),
    "temperature": ({"temperature": "1e-40"}, "--temperature: must be"),
    "stop": ({"stop": ["x", ""]}, "an empty text would end every answer at once"),
    "lengths": ({"generate_max_len": 1000}, "knows 512 positions"),
    "no directory": ({"save_path": ""}, "--save_path: names no directory"),
    "a long path": ({"save_path": "/tmp/" + "x" * 300}, "File name too long"),
    "no data": ({"prompt_data": ","}, "',' names no data"),
    "engines": ({"vllm_num_engines": 100000}, "--vllm_num_engines: must be"),
    "not a number": ({"actor_learning_rate": "nan"}, "--actor_learning_rate: expected"),
    "logs": ({"logging_dir": "/dev/null/x"}, "--logging_dir: /dev/null is a file"),
}


@pytest.mark.parametrize("case", FLAGS)
def test_flags_that_cannot_work(refused, case):
    changes, words = FLAGS[case]
    assert words in refused(**changes)


def test_a_file_of_nothing_but_zeros(refused, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b"\0" * 1000)
    assert "cannot read" in refused(prompt_data=tmp_path / "rows.jsonl")


def test_a_cluster_that_does_not_answer(refused):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        said = refused(ray_address=address)
    assert f"--ray_address {address}: no Ray cluster answers there" in said


def test_a_plugin_that_ends_the_process(refused, tmp_path, monkeypatch):
    (tmp_path / "ending_plugin.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert "cannot import ending_plugin: SystemExit: 3" in refused(plugin="ending_plugin")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_flash_attention_that_cannot_run(refused, device):
    """Without a GPU, or a package that is not installed."""
    said = refused(device=device, param_dtype="bf16", attn_implementation="flash_attention_2")
    assert "--attn_implementation flash_attention_2" in said and "leave it out" in said


def test_nccl_that_cannot_be_is_warned_of(task, tmp_path):
    plan = plan_of(ppo_flags(task, tmp_path, device="auto", vllm_sync_backend="nccl"))
    assert "WARNING: --vllm_sync_backend nccl is not used" in plan
    assert "WARNING" not in plan_of(ppo_flags(task, tmp_path, device="auto"))
