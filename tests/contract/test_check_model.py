"""``check_model``: what holds, and what does not, with the numbers; on transformers' generation."""

import json

import pytest
from transformers import AutoConfig

from openrl.cli.check_model import prepare, run
from openrl.cli.run import command
from openrl.config.commands import CheckModelConfig
from openrl.config.groups.model import ModelFlags
from openrl.models.small import write_small_model
from openrl.trainer.planning.certificate import CHECKS, Subject, examine
from tests.tiny import tiny_model_dir


def check(*words):
    flags = ["--device", "cpu", "--rollout_backend", "hf", *map(str, words)]
    return command(CheckModelConfig, prepare, run, flags)


def test_a_model_that_can_be_trained(tmp_path, capsys):
    model, found = tiny_model_dir(tmp_path), tmp_path / "found.json"
    assert check("--pretrain", model, "--output_json", found, "--gpu", "h100") == 0
    record = json.loads(found.read_text())
    assert [c["check"] for c in record["checks"]] == list(CHECKS)
    assert {c["verdict"] for c in record["checks"]} == {"yes"}
    shown = capsys.readouterr().out
    assert "24 tensors synced" in shown  # as many as the checkpoint holds
    assert "GRPO on one GPU of 80 GiB" in shown and "fits" in shown


def test_a_config_alone(tmp_path, capsys):
    """Attention with sinks is not that of packed rows; the rest holds."""
    AutoConfig.for_model("gpt_oss").save_pretrained(tmp_path / "config")
    assert check("--pretrain", tmp_path / "config", "--tiny") == 1
    said = capsys.readouterr()
    assert "what does not hold: packed rows, shared prefixes" in said.err
    assert "a small model of its shape" in said.out


def small(tmp_path, kind):
    AutoConfig.for_model(kind).save_pretrained(tmp_path / "config")
    write_small_model(str(tmp_path / "config"), tmp_path / "small", False)
    return Subject(ModelFlags(pretrain=str(tmp_path / "small"), param_dtype="fp32"), "cpu", "hf")


def test_a_sync_that_leaves_a_tensor_out_is_found(tmp_path, monkeypatch):
    from openrl.trainer.planning import certificate

    whole = certificate.checkpoint_weights

    def one_old(model, stage, without_tower):
        """The last norm comes as it was before the weights were changed."""
        for name, tensor in whole(model, stage, without_tower):
            yield name, tensor.new_ones(tensor.shape) if name == "model.norm.weight" else tensor

    monkeypatch.setattr(certificate, "checkpoint_weights", one_old)
    found = {finding.check: finding for finding in examine(small(tmp_path, "llama"))}
    assert found["engine = trainer"].verdict == "no"
    assert "the rollout engine and the trainer disagree" in found["engine = trainer"].measured
    assert {f.verdict for name, f in found.items() if name != "engine = trainer"} == {"yes"}


def test_layers_with_a_state(tmp_path):
    found = {finding.check: finding for finding in examine(small(tmp_path, "qwen3_next"))}
    assert {finding.verdict for finding in found.values()} == {"yes"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "H1000"], "no such GPU is known"),
        (["--gpu", "0x"], "no such GPU is known"),
    ],
)
def test_bad_input(tmp_path, capsys, words, message):
    assert check("--pretrain", tiny_model_dir(tmp_path), *words) == 2
    assert message in capsys.readouterr().err


def test_what_is_no_language_model(tmp_path, capsys):
    AutoConfig.for_model("bert", architectures=["BertForMaskedLM"]).save_pretrained(tmp_path / "m")
    assert check("--pretrain", tmp_path / "m") == 2
    assert "writes no text" in capsys.readouterr().err


def test_a_download_that_broke_off(tmp_path, capsys):
    model = tiny_model_dir(tmp_path)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert check("--pretrain", model) == 2
    assert "bytes instead of" in capsys.readouterr().err
