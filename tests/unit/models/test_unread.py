"""Stored tensors that no parameter takes are named; a head's bias is one that is taken."""

import json
import shutil
import warnings

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from openrl.config.groups.model import LoadFlags, WeightFlags
from openrl.errors import UserError
from openrl.models.causal_lm import Loading
from openrl.models.lora_merge import merge_adapter
from openrl.models.scalar_model import RewardModel, ValueModel, load_scalar_model
from openrl.models.stored import (
    check_backbone,
    check_head,
    check_language_model,
    stored_shapes,
)
from tests.tiny import tiny_model_dir, tiny_reward_model_dir
from tests.unit.models.test_lora_merge import make_adapter

FP32 = Loading(LoadFlags(param_dtype="fp32"), "cpu")
IDS = torch.tensor([[5, 9, 7, 12], [8, 8, 30, 4]])
SEEN = torch.ones_like(IDS, dtype=torch.bool)


def add(path, **tensors):
    """Add tensors to a model's file."""
    file = path / "model.safetensors"
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(load_file(file) | named, file, metadata={"format": "pt"})
    return str(path)


def warned(check, *arguments):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(*arguments)
    return [str(warning.message) for warning in caught if "left out" in str(warning.message)]


@pytest.mark.parametrize("exact", [False, True], ids=["", "value_head_fp32"])
@pytest.mark.parametrize("head", ["score", "v_head.summary"])
def test_the_bias_of_a_head_counts(tmp_path, head, exact):
    path = tiny_reward_model_dir(tmp_path, head_name=head)
    plain = load_scalar_model(RewardModel, str(path), FP32, head, fp32_head=exact)
    add(path, **{f"{head}.bias": torch.tensor([0.5])})
    shifted = load_scalar_model(RewardModel, str(path), FP32, head, fp32_head=exact)
    with torch.no_grad():
        torch.testing.assert_close(shifted(IDS, SEEN)[0], plain(IDS, SEEN)[0] + 0.5)
    saved = shifted.to_checkpoint({f"head.{n}": t for n, t in shifted.head.named_parameters()})
    assert {name: t.tolist() for name, t in saved.items() if "bias" in name} == {
        f"{head}.bias": [0.5]
    }
    assert not warned(check_head, str(path), head, False)
    with torch.no_grad():
        values = load_scalar_model(ValueModel, str(path), FP32, head)(IDS, SEEN)[0]
        torch.testing.assert_close(values[:, 0], torch.zeros(2))  # of no token
        rewards = shifted(IDS, SEEN)[0]
        longer = torch.cat([IDS, IDS[:, :1]], dim=1)
        critic = load_scalar_model(ValueModel, str(path), FP32, head)
        last = critic(longer, torch.ones_like(longer, dtype=torch.bool))[0][:, -1]
        torch.testing.assert_close(last, rewards)


@pytest.mark.parametrize("trained", [False, True], ids=["of the base", "of the adapter"])
def test_the_bias_of_a_head_is_merged(tmp_path, trained):
    path = tiny_reward_model_dir(tmp_path)
    add(path, score__bias=torch.tensor([0.5]))
    model = load_scalar_model(RewardModel, str(path), FP32, "score")
    classifier = classifier_of(path)
    adapter = make_adapter(
        classifier, tmp_path / "adapter", modules_to_save=["score"] if trained else None
    )
    flags = WeightFlags(param_dtype="fp32")
    merge_adapter(str(path), str(adapter), tmp_path / "merged", flags, "score")
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert merged["score.bias"].tolist() == ([0.75] if trained else [0.5])
    assert model.head.bias.item() == 0.5


def classifier_of(path):
    """transformers' model of a reward model whose head has a bias, set to another value."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    weight = model.score.weight.detach().clone()
    model.score = torch.nn.Linear(weight.shape[1], 1)
    with torch.no_grad():
        model.score.weight.copy_(weight)
        model.score.bias.fill_(0.75)
    return model


def test_what_no_parameter_takes_is_named(tmp_path):
    extra = torch.zeros(3)
    language = tiny_model_dir(tmp_path)
    add(language, model__layers__0__mlp__gate_proj__bias=extra, adapter__scale=extra.clone())
    (said,) = warned(check_language_model, str(language), False)
    assert "no parameter for 2 stored tensors, left out: " in said
    assert "model.layers.0.mlp.gate_proj.bias" in said and "adapter.scale" in said
    reward = tiny_reward_model_dir(tmp_path)
    add(reward, second__weight=extra)
    for check in (check_head, check_backbone):
        arguments = ("score", False) if check is check_head else (False, "score")
        (said,) = warned(check, str(reward), *arguments)
        assert "no parameter for 1 stored tensor, left out: " in said and "second.weight" in said


def test_a_head_of_several_outputs_starts_no_reward_model_or_critic(tmp_path):
    path = add(tiny_reward_model_dir(tmp_path), score__weight=torch.zeros(2, 64))
    for check, arguments in ((check_head, ("score", False)), (check_backbone, (False, "score"))):
        with pytest.raises(UserError, match="has 2 outputs per text"):
            check(path, *arguments)


@pytest.mark.parametrize("arch", ["qwen3", "gpt2", "llama", "qwen3_moe"])
def test_what_is_left_out_on_purpose_is_not(tmp_path, arch):
    path = tiny_model_dir(tmp_path, arch=arch)
    assert not warned(check_language_model, str(path), False)
    head = torch.zeros(1, 64)
    add(path, v_head__weight=head, layers__0__rotary_emb__inv_freq=torch.zeros(8))
    assert not warned(check_language_model, str(path), False)
    assert not warned(check_backbone, str(path), False, "score")
    add(path, mine__weight=head)
    assert warned(check_language_model, str(path), False)
    assert not warned(check_backbone, str(path), False, "mine")


def as_bin(path, shards=1):
    """Store a model's weights as torch.save does, in so many files."""
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(weights)
    if shards == 1:
        torch.save(weights, path / "pytorch_model.bin")
        return
    files = [f"pytorch_model-{n}-of-{shards}.bin" for n in range(shards)]
    for n, file in enumerate(files):
        torch.save({name: weights[name] for name in names[n::shards]}, path / file)
    index = {name: files[n % shards] for n, name in enumerate(names)}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize("shards", [1, 2])
def test_tensors_of_bin_files_are_named_too(tmp_path, shards):
    path = tiny_model_dir(tmp_path)
    shapes = stored_shapes(str(path))
    add(path, adapter__scale=torch.zeros(3))
    as_bin(path, shards)
    (said,) = warned(check_language_model, str(path), False)
    assert "1 stored tensor, left out: adapter.scale" in said
    assert stored_shapes(str(path)) == shapes | {"adapter.scale": (3,)}
    (path / "config.json").write_text((path / "config.json").read_text().replace(": 128", ": 96"))
    with pytest.raises(UserError, match="and by the config"):
        check_language_model(str(path), False)


def test_bin_files_that_are_missing_or_hold_no_weights(tmp_path):
    path = tiny_model_dir(tmp_path)
    as_bin(path, 2)
    (path / "pytorch_model-1-of-2.bin").unlink()
    with pytest.raises(UserError, match="1 of its files missing"):
        stored_shapes(str(path))
    (path / "pytorch_model.bin.index.json").unlink()
    torch.save([1, 2], path / "pytorch_model-0-of-2.bin")
    with pytest.raises(UserError, match="holds no weights"):
        stored_shapes(str(path))


def test_a_name_of_the_hub_is_looked_up_in_its_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    home = tmp_path / "cache/models--people--small"
    path = tiny_model_dir(tmp_path)
    shapes = stored_shapes(str(path))
    assert shapes and stored_shapes("people/small") == {} == stored_shapes("no name/at/all")
    (home / "refs").mkdir(parents=True)
    (home / "refs/main").write_text("0" * 40)
    shutil.copytree(path, home / "snapshots" / ("0" * 40))
    assert stored_shapes("people/small") == shapes
    (home / "snapshots" / ("0" * 40) / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors"}})
    )
    assert stored_shapes("people/small") == {}  # what is missing is downloaded later
