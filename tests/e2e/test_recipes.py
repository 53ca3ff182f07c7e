"""The recipes of examples/scripts: the full form gets the plan that examples/README.md states, on
models of the right shapes; with TINY=1 they train two steps on a CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from openrl.files import write_atomically
from tests.e2e.bench import without_ray
from tests.e2e.runs import ROOT, command_of, metrics, plan_of, run_here
from tests.marks import full_after
from tests.tiny import SPECIALS

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def shape(arch: str, numbers: str, tied: bool) -> dict[str, object]:
    """A config by width, width of the MLP, layers, heads, heads of keys and values, words."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "vocab_size")
    sizes = dict(zip(names, map(int, numbers.split()), strict=True))
    positions = {"max_position_embeddings": 32768, "tie_word_embeddings": tied}
    return {"model_type": arch, "dtype": "bfloat16"} | sizes | positions


SHAPES = {
    "Llama-3-8b": shape("llama", "4096 14336 32 32 8 128256", False),
    "Qwen2.5-0.5B": shape("qwen2", "896 4864 24 14 2 151936", True),
    "Qwen2.5-3B": shape("qwen2", "2048 11008 36 16 2 151936", True),
    "Qwen2.5-7B": shape("qwen2", "3584 18944 28 28 4 152064", False),
    "Qwen3-4B": shape("qwen3", "2560 9728 36 32 8 151936", True) | {"head_dim": 128},
}
# recipe -> its model, samples per step, optimizer steps of it, and of how many samples
PLANS = {
    "ppo_reward_model": ("Llama-3-8b", "1,024", 8, 128),
    "reinforce_baseline": ("Qwen3-4B", "1,024", 1, 1024),
    "dynamic_filtering": ("Qwen3-4B", "1,024", 1, 1024),
    "math12k": ("Qwen2.5-7B", "2,560", 4, 640),
    "countdown_qwen": ("Qwen3-4B", "1,024", 1, 1024),
    "rlvr_domains": ("Qwen2.5-7B", "512", 1, 512),
    "sokoban": ("Qwen2.5-0.5B", "512", 1, 512),
    "weighted_verifiers": ("Qwen2.5-7B", "256", 2, 128),
}


ON_GPUS = ["--device", "cuda", "--ray_address", "auto", "--gpu_memory_gb", "80"]
README = (ROOT / "examples/README.md").read_text()
NAMES = ["weighted_verifiers", *[name for name in PLANS if name != "weighted_verifiers"]]


def words_tokenizer() -> PreTrainedTokenizerFast:
    """About as many tokens for a text as the real ones make of it: one for each word or mark."""
    vocabulary = {token: i for i, token in enumerate(SPECIALS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIALS, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT, **names)


def model_of(folder: Path, name: str) -> Path:
    """What a plan reads of a model: config, tokenizer and a scalar head, without other weights."""
    path = folder / name
    if not path.exists():
        config = AutoConfig.for_model(**SHAPES[name], mean=0.0, std=1.0)
        config.architectures = [f"{config.model_type.title()}ForCausalLM"]
        config.save_pretrained(path)
        words_tokenizer().save_pretrained(path)
        head = torch.zeros(1, config.hidden_size)
        save_file({"score.weight": head}, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipes")
    row = {
        "prompt": "1+1",
        "problem": "1+1",
        "label": "2",
        "answer": "2",
        "context_messages": "1+1",
    }
    write_atomically(path / "rows.jsonl", f"{json.dumps(row)}\n" * 8192)
    return path


@pytest.mark.parametrize("recipe", full_after(1, NAMES))
def test_the_full_form_gets_its_plan(recipe, folder, monkeypatch):
    name, samples, updates, size = PLANS[recipe]
    model, rows = str(model_of(folder, name)), str(folder / "rows.jsonl")
    flags = command_of(recipe, folder, MODEL=model, REWARD_MODEL=model, DATA=rows, EVAL_DATA=rows)
    monkeypatch.chdir(ROOT)
    plan = plan_of([*flags, *ON_GPUS])
    stages = plan.split("most on one GPU")[1].split("Not counted")[0]
    most = max(float(gib) for gib in re.findall(r"([\d.]+) GiB +[\d.]+ \w+\n", stages))
    line = next(line for line in README.splitlines() if f"[{recipe}.sh]" in line)
    assert line.endswith(f"| {most:g} GiB |"), f"examples/README.md: {recipe} needs {most:g} GiB"
    assert re.search(rf"samples per step +{samples} ", plan)
    assert re.search(rf"optimizer steps per step +{updates} +of {size} samples", plan)


@pytest.mark.full
@pytest.mark.parametrize("recipe", [*NAMES, "number_game_vl"])
def test_the_tiny_form_trains(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = command_of(recipe, tmp_path, TINY="1")
    assert run_here(flags, without_ray) == 0
    steps = metrics(tmp_path / "out")
    assert [step["step"] for step in steps if step["step"]] == [1, 2]  # 0: an evaluation before
