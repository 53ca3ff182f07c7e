"""Adapters inside a model: merged as peft merges them, refused where they would not be what they
say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from openrl.config.groups.lora import LoRAFlags
from openrl.errors import UserError
from openrl.models.lora import TRAINED, add_adapters, check_targets
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("base"), tied=False)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("mixture"), arch="qwen3_moe", tied=False)


def load(path: Path):
    return AutoModelForCausalLM.from_pretrained(path)


def randomized(hf):
    """Its new adapters, of random numbers: unlike fresh ones they change the model."""
    adapters = add_adapters(hf, LoRAFlags(lora_rank=4), "base", seed=0)
    torch.manual_seed(1)
    for name, parameter in hf.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)
    return adapters


@pytest.mark.parametrize("arch", ["qwen3", "gpt2"])
def test_merged_weights_are_those_of_peft(base, arch):
    """GPT-2 keeps its weights (in, out), square ones too, where a change the wrong way round would
    go unnoticed."""
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 40, "n_positions": 32}
    hf = load(base) if arch == "qwen3" else GPT2LMHeadModel(GPT2Config(**shape))
    adapters = randomized(hf)
    with torch.no_grad():
        merged = adapters.merged(dict(hf.named_parameters()))
        for name, layer in adapters.layers.items():
            expected = layer.base_layer.weight + layer.get_delta_weight(TRAINED)
            torch.testing.assert_close(merged[f"{name}.weight"], expected)
            assert not torch.allclose(expected, layer.base_layer.weight)
    assert not any("lora" in name or "base_layer" in name for name in merged)


def test_a_mixture_of_experts_has_adapters_on_its_linear_layers(mixture):
    """peft would wrap the fused weights of experts as well, whose names and changes are other ones
    than a layer's."""
    hf = load(mixture)
    names = {name for name, _ in hf.named_parameters()}
    adapters = randomized(hf)
    assert {name.rpartition(".")[2] for name in adapters.layers} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    assert adapters.merged(dict(hf.named_parameters())).keys() == names
    for targets in (("gate_proj", "up_proj", "down_proj"), ("q_proj", "gate")):
        with pytest.raises(
            UserError, match=r"experts.*\n.*names such as k_proj o_proj q_proj v_proj"
        ):
            check_targets(LoRAFlags(lora_rank=4, target_modules=targets), str(mixture), False)


def test_a_backbone_without_a_head_has_adapters(base):
    assert add_adapters(
        AutoModel.from_pretrained(base), LoRAFlags(lora_rank=4), str(base), 0, "model."
    ).layers


def test_a_failure_while_adapters_are_off_leaves_them_on(base):
    hf, ids = load(base).eval(), torch.arange(4, 12)[None]
    adapters = randomized(hf)
    with torch.no_grad():
        before = hf(ids).logits
        with pytest.raises(RuntimeError, match="on the way"), adapters.as_reference():
            assert not torch.allclose(hf(ids).logits, before)
            raise RuntimeError("on the way")
        assert torch.equal(hf(ids).logits, before)


def test_the_output_head_takes_no_adapter(base):
    """Its place is taken by what computes log-probs, so this would fail only when workers load the
    model."""
    with pytest.raises(
        UserError, match=r"the output head takes no adapter\n.*names such as down_proj(?!.*lm_head)"
    ):
        check_targets(LoRAFlags(lora_rank=4, target_modules=("lm_head",)), str(base), False)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({}, None),
        ({"use_rslora": True, "rank_pattern": {"q_proj": 2}, "layers_to_transform": [0]}, None),
        ({"lora_bias": True}, "with lora_bias"),
        ({"bias": "all"}, "with bias"),
        ({"use_dora": True}, "with use_dora"),
        ({"init_lora_weights": "olora"}, "with init_lora_weights olora"),
        ({"target_parameters": ["mlp.up_proj.weight"]}, "with target_parameters"),
    ],
)
def test_adapters_of_others_are_taken_if_they_are_plain(base, tmp_path, settings, what):
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **settings)
    get_peft_model(load(base), config).save_pretrained(tmp_path)
    flags = LoRAFlags(lora_adapter_path=str(tmp_path))
    if what is None:
        check_targets(flags, str(base), False)
        assert add_adapters(load(base), flags, str(base), seed=0).layers
    else:
        with pytest.raises(UserError, match=f"an adapter {what} cannot be trained here"):
            check_targets(flags, str(base), False)
