"""``check_model``: what holds, and what does not, with the numbers; on transformers' generation."""

import json

import pytest
from transformers import AutoConfig

from openrl.cli.check_model import prepare, run
from openrl.cli.run import command
from openrl.config.commands import CheckModelConfig
from openrl.config.groups.model import ModelFlags
from openrl.errors import UserError
from openrl.models.small import write_small_model
from openrl.trainer.planning.certificate import CHECKS, Subject, examine
from openrl.trainer.planning.chat_checks import answers, reasoning, tool_calls
from tests.tiny import tiny_model_dir, tiny_tokenizer
from tests.tiny_vision import tiny_vision_dir

pytestmark = pytest.mark.full


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
    assert record["flags"].startswith("--packing_samples --use_dynamic_batch --prefix_grouper")
    assert "--max_images_per_prompt" not in record["flags"]  # it reads text
    whole, adapted = record["steps"]
    assert 0 < adapted["peak_bytes"] <= whole["peak_bytes"] < 80 * 2**30
    assert whole["gpu_gib"] == 80 and whole["trained"] == "all weights"


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


def test_a_model_that_sees(tmp_path, capsys):
    """The image goes through processor, engine and trainer."""
    found = tmp_path / "found.json"
    assert check("--pretrain", tiny_vision_dir(tmp_path), "--output_json", found) == 0
    record = json.loads(found.read_text())
    assert record["flags"].endswith("--max_images_per_prompt 1 --apply_chat_template")
    (image,) = (c["measured"] for c in record["checks"] if c["check"] == "image path")
    assert "tokens of an image; largest gap" in image


HERMES = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> Write <tool_call>{}</tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{\"name\": "
    '{{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_what_a_chat_template_writes_is_read_back():
    tokenizer = tiny_tokenizer()
    for check in (answers, tool_calls, reasoning):
        assert check(tokenizer).startswith("none: prompts are texts")
    tokenizer.chat_template = HERMES
    assert answers(tokenizer) == "an answer follows its prompt; engines stop at '<eos>'"
    assert tool_calls(tokenizer) == "--tool_parser hermes reads back a call"
    expected = "read back into 'reasoning_content', between '<think>' and '</think>'"
    assert reasoning(tokenizer) == expected
    tokenizer.chat_template = HERMES.replace("tool_call>", "made_up>")
    with pytest.raises(UserError, match="no parser reads back a call"):
        tool_calls(tokenizer)


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
