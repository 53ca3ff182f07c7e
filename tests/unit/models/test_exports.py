"""Writing a trained model: what could be refused is tried before, and the weights come first."""

from __future__ import annotations

import errno
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrl.errors import UserError
from openrl.models.exports import (
    check_export,
    check_tokenizer_saves,
    check_written,
    require_all,
    write_files,
)
from tests.tiny import tiny_model_dir

REFUSED = [{"do_sample": False, "temperature": 0.5}, {"num_beams": 1, "early_stopping": True}]


@pytest.fixture
def base(tmp_path):
    return tiny_model_dir(tmp_path)


def model_of(base):
    hf = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    weights = {name: p.detach().clone() for name, p in hf.named_parameters()}
    return hf, weights


@pytest.mark.parametrize("fields", REFUSED)
def test_a_generation_config_that_cannot_be_saved_is_refused_before_the_start(base, fields):
    check_export(str(base), False)
    (base / "generation_config.json").write_text(json.dumps(fields))
    name = "early_stopping" if "early_stopping" in fields else "temperature"
    with pytest.raises(UserError, match=rf"generation_config.json cannot be saved.*{name}"):
        check_export(str(base), False)
    check_export(str(base), False, generates=False)  # a reward model has none


def test_a_tokenizer_that_cannot_be_saved_is_refused_before_the_start(base, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(base)
    check_tokenizer_saves(tokenizer)

    def refuse(*args, **kwargs):
        raise NotImplementedError("no way")

    monkeypatch.setattr(type(tokenizer), "save_pretrained", refuse)
    with pytest.raises(UserError, match=r"tokenizer cannot be saved .*NotImplementedError: no way"):
        check_tokenizer_saves(tokenizer)


def test_the_weights_are_written_whatever_the_rest_does(base, tmp_path):
    hf, weights = model_of(base)
    hf.generation_config.do_sample, hf.generation_config.temperature = False, 0.5

    def refuse(directory):
        raise ImportError("a package is missing")

    out = tmp_path / "out"
    out.mkdir()
    failed = write_files(out, hf, weights, {"mine": 1}, {"processor": refuse})
    assert [line.partition(":")[0] for line in failed] == ["generation_config.json", "processor"]
    stored = load_file(out / "model.safetensors")
    assert all(torch.equal(stored[name], weights[name]) for name in weights)
    assert json.loads((out / "config.json").read_text())["mine"] == 1
    with pytest.raises(UserError, match=r"(?s)the trained weights are in .*ImportError: a package"):
        require_all(out, failed)
    require_all(out, [])


def test_a_full_disk_ends_the_export(base, tmp_path):
    hf, weights = model_of(base)

    def full(directory):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "out").mkdir()
    with pytest.raises(OSError, match="No space left"):
        write_files(tmp_path / "out", hf, weights, {}, {"processor": full})


@pytest.mark.parametrize("change", ["value", "missing", "more", "dtype"])
def test_what_was_written_is_compared(tmp_path, change):
    weights = {"a": torch.ones(2), "b": torch.tensor([1.0, torch.nan])}
    stored = {name: tensor.clone() for name, tensor in weights.items()}
    save_file(stored, tmp_path / "model.safetensors")
    check_written(tmp_path, weights)
    if change == "value":
        stored["a"][1] += 1e-6
    elif change == "missing":
        del stored["a"]
    elif change == "more":
        stored["a2"] = torch.ones(1)
    else:
        stored["a"] = stored["a"].bfloat16()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"a2? was not written as it was trained"):
        check_written(tmp_path, weights)
