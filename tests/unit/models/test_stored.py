"""What the config and the headers of a stored model tell."""

import json

import pytest
from transformers import AutoConfig

from openrl.errors import UserError
from openrl.models.stored import check_language_model, check_trainable
from tests.tiny import tiny_model_dir


@pytest.mark.parametrize(("head", "writes"), [("GPT2LMHeadModel", True), ("GPT2Model", False)])
def test_an_old_config_that_calls_a_language_model_no_decoder(tmp_path, head, writes):
    """Early versions of transformers wrote is_decoder into every config."""
    path = tiny_model_dir(tmp_path, arch="gpt2")
    config = json.loads((path / "config.json").read_text())
    old = config | {"is_decoder": False, "architectures": [head]}
    (path / "config.json").write_text(json.dumps(old))
    if writes:
        check_language_model(str(path), False)
    else:
        with pytest.raises(UserError, match=f"is a {head}, which writes no text"):
            check_language_model(str(path), False)


def test_a_model_without_a_backbone_of_its_own_cannot_be_trained(tmp_path):
    """Llama 4's output head is inside of what its classes hold as one."""
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2}
    text = {**small, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 99}
    text |= {"intermediate_size_mlp": 128, "num_local_experts": 2}
    seeing = AutoConfig.for_model("llama4", text_config=text, vision_config=small)
    reading = AutoConfig.for_model("llama4_text", **text)
    for config, kind in (
        (seeing, "Llama4ForConditionalGeneration"),
        (reading, "Llama4ForCausalLM"),
    ):
        config.save_pretrained(tmp_path / kind)
        with pytest.raises(UserError, match=f"a {kind} has no backbone apart from its output"):
            check_trainable(str(tmp_path / kind), False, False)
    check_trainable(str(tiny_model_dir(tmp_path)), False, False)
