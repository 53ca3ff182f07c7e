"""Small models keep every kind of layer of the model whose shape they have."""

import pytest
from transformers import AutoConfig

from openrl.errors import UserError
from openrl.models.small import MOST_LAYERS, small_config, write_small_model
from openrl.models.stored import check_language_model, stored_shapes


@pytest.fixture
def config_of(tmp_path):
    def config_of(kind, **fields):
        AutoConfig.for_model(kind, **fields).save_pretrained(tmp_path / kind)
        return str(tmp_path / kind)

    return config_of


def test_every_kind_of_layer_is_kept(config_of):
    """Qwen3-Next has three layers with a state before each with full attention."""
    config = small_config(config_of("qwen3_next"), False)
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert config.num_hidden_layers == 4 and config.num_experts == 4
    deepseek = small_config(config_of("deepseek_v3", first_k_dense_replace=3), False)
    assert (deepseek.num_hidden_layers, deepseek.first_k_dense_replace) == (2, 1)
    assert small_config(config_of("llama"), False).num_hidden_layers == 2


def test_queries_share_keys_only_where_they_did(config_of):
    grouped = small_config(config_of("qwen3", num_attention_heads=32, num_key_value_heads=8), False)
    assert (grouped.num_attention_heads, grouped.num_key_value_heads) == (4, 2)
    alone = small_config(config_of("deepseek_v2", num_key_value_heads=32), False)
    assert alone.num_key_value_heads == alone.num_attention_heads == 4


def test_a_small_model_is_a_whole_checkpoint(config_of, tmp_path):
    write_small_model(config_of("gemma2"), tmp_path / "small", False)
    check_language_model(str(tmp_path / "small"), False)
    shapes = stored_shapes(str(tmp_path / "small"))
    assert shapes["model.embed_tokens.weight"] == (512, 128)
    assert not any(f"layers.{MOST_LAYERS}." in name for name in shapes)


def test_what_is_no_language_model_is_refused(config_of, tmp_path):
    with pytest.raises(UserError, match="no small model of its shape can be made"):
        write_small_model(config_of("vit"), tmp_path / "small", False)
