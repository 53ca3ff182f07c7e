"""A merged model says what base and adapter say, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from openrl.config.groups.model import LoadFlags, WeightFlags
from openrl.errors import UserError
from openrl.models import lora_merge
from openrl.models.causal_lm import Loading
from openrl.models.lora_merge import merge_adapter
from openrl.models.scalar_model import RewardModel, load_scalar_model
from tests.tiny import tiny_model_dir, tiny_reward_model_dir

FP32 = WeightFlags(param_dtype="fp32")
IDS = torch.randint(4, 60, (3, 11), generator=torch.Generator().manual_seed(0))


def make_adapter(model: torch.nn.Module, out: Path, **settings) -> Path:
    """An adapter of random numbers on attention and MLP: unlike a fresh one it changes the
    model."""
    torch.manual_seed(1)
    settings = {"target_modules": ["q_proj", "v_proj", "down_proj"]} | settings
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **settings)
    get_peft_model(model, config).save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return make_adapter(model, tmp_path_factory.mktemp("adapter"))


def logprobs(model):
    with torch.no_grad():
        return model(IDS).logits.log_softmax(-1)


def test_a_merged_language_model_has_the_logprobs_of_base_and_adapter(base, adapter, tmp_path):
    merge_adapter(str(base), str(adapter), tmp_path / "merged", FP32, None)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logprobs(plain)
    expected = logprobs(PeftModel.from_pretrained(plain, adapter))
    found = logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (expected - before).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").get_vocab()


def test_weights_are_rounded_once(base, adapter, tmp_path):
    merge_adapter(str(base), str(adapter), tmp_path / "exact", FP32, None)
    (tmp_path / "rounded").mkdir()  # an empty directory is fine
    merge_adapter(
        str(base), str(adapter), tmp_path / "rounded", WeightFlags(param_dtype="bf16"), None
    )
    exact, rounded = (
        load_file(tmp_path / name / "model.safetensors") for name in ("exact", "rounded")
    )
    assert exact.keys() == rounded.keys()
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)


@pytest.mark.parametrize(
    ("head_name", "trained"), [("score", False), ("value_head", False), ("score", True)]
)
def test_a_merged_reward_model_has_the_scores_of_base_and_adapter(tmp_path, head_name, trained):
    """Whether the adapter holds a head of its own (``trained``) or the base's stays."""
    source, twin = (
        tiny_reward_model_dir(tmp_path / name, head_name=name) for name in (head_name, "score")
    )
    model = AutoModelForSequenceClassification.from_pretrained(twin, dtype=torch.float32)
    if trained:
        with torch.no_grad():
            model.score.weight.mul_(3)
    adapter = make_adapter(
        model, tmp_path / "adapter", modules_to_save=["score"] if trained else None
    )
    expected_model = model.eval()  # peft put its layers into it
    with torch.no_grad():
        expected = expected_model(IDS, attention_mask=torch.ones_like(IDS)).logits[:, 0]

    merge_adapter(str(source), str(adapter), tmp_path / "merged", FP32, "score")
    merged = load_scalar_model(
        RewardModel,
        str(tmp_path / "merged"),
        Loading(LoadFlags(param_dtype="fp32"), "cpu"),
        "score",
    )
    with torch.no_grad():
        found = merged(IDS, torch.ones_like(IDS, dtype=torch.bool))[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert classifier.config.num_labels == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
)
def test_a_tied_head_is_untied_where_the_adapter_changes_it_or_the_embedding(
    base, tmp_path, settings
):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapter = make_adapter(model, tmp_path / "adapter", **settings)
    if "modules_to_save" in settings:
        path = adapter / "adapter_model.safetensors"
        stored = load_file(path)
        stored = {n: t * 1.5 if "lm_head" in n else t for n, t in stored.items()}
        save_file(stored, path, metadata={"format": "pt"})
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = logprobs(PeftModel.from_pretrained(plain, adapter))
    merge_adapter(str(base), str(adapter), tmp_path / "merged", FP32, None)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not merged.config.tie_word_embeddings
    torch.testing.assert_close(logprobs(merged), expected, atol=1e-5, rtol=1e-5)


def test_a_tied_head_that_nothing_changes_stays_tied(base, adapter, tmp_path):
    merge_adapter(str(base), str(adapter), tmp_path / "merged", FP32, None)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.tie_word_embeddings
    assert "lm_head.weight" not in load_file(tmp_path / "merged/model.safetensors")


@pytest.mark.parametrize("step", ["merged into", "the model that was written"])
def test_a_merge_that_changes_what_the_model_says_is_refused(
    base, adapter, tmp_path, monkeypatch, step
):
    """The logits with the adapter, merged, before and after writing: one of them is off."""
    found = iter([0.0, 1e-4] if step == "merged into" else [0.0, 0.0, 0.0, 1e-4])

    def logits(model, plain=lora_merge._logits):
        return plain(model) * (1 + next(found))

    monkeypatch.setattr(lora_merge, "_logits", logits)
    with pytest.raises(UserError, match=f"{step}.* gives other logits"):
        merge_adapter(str(base), str(adapter), tmp_path / "merged", FP32, None)
    assert not any("merged" in p.name for p in tmp_path.iterdir())


def test_a_base_without_head_is_no_reward_model(base, adapter, tmp_path):
    with pytest.raises(UserError, match=r"neither .* holds a scalar head"):
        merge_adapter(str(base), str(adapter), tmp_path / "merged", FP32, "score")


def test_what_the_output_holds_is_never_overwritten(base, adapter, tmp_path):
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged/precious").touch()
    with pytest.raises(OSError, match="not empty"):
        merge_adapter(str(base), str(adapter), tmp_path / "merged", FP32, None)
    assert [p.name for p in tmp_path.rglob("*")] == ["merged", "precious"]


def test_an_adapter_of_another_model_is_refused_and_leaves_nothing(adapter, tmp_path):
    wide = tiny_model_dir(tmp_path, hidden_size=96)
    with pytest.raises(UserError, match="does not fit"):
        merge_adapter(str(wide), str(adapter), tmp_path / "merged", FP32, None)
    shallow = tiny_model_dir(tmp_path, seed=1, num_hidden_layers=1)
    with pytest.raises(UserError, match="does not fit"):
        merge_adapter(str(shallow), str(adapter), tmp_path / "merged", FP32, None)
    assert not any("merged" in p.name for p in tmp_path.iterdir())


def test_an_adapter_with_added_tokens_is_told_what_its_base_lacks(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokens = model.config.vocab_size
    model.resize_token_embeddings(tokens + 8)
    saved = {"modules_to_save": ["embed_tokens", "lm_head"]}
    adapter = make_adapter(model, tmp_path / "adapter", **saved)
    with pytest.raises(UserError, match=f"of {tokens + 8} tokens, .* one of {tokens}: tokens were"):
        merge_adapter(str(base), str(adapter), tmp_path / "merged", FP32, None)
