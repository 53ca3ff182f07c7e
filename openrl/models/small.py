"""A small random model of another one's shape: every kind of layer it has, in a few megabytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.utils import logging

from openrl.errors import UserError
from openrl.models.stored import load_config
from openrl.models.towers import language_model_class

MOST_LAYERS = 12
SPECIALS = ("pad", "bos", "eos")  # the first tokens
WIDTH = 0.2  # of initial weights: far from uniform, so that a wrong weight shows in every log-prob

SIZES: dict[str, int] = {
    "hidden_size": 128,  # four heads of 32 where a config does not say a head's width
    "intermediate_size": 128,
    "intermediate_size_mlp": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's attention on a CPU knows
    "global_head_dim": 32,
    "query_pre_attn_scalar": 32,
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 16,
    "sliding_window": 16,
    "attention_chunk_size": 16,
    # mixtures of experts
    "moe_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    # attention over a latent
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    # layers with a state
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,  # vLLM's kernel on a CPU knows few others
    "linear_value_head_dim": 128,
    "mamba_d_ssm": 256,
    "mamba_n_heads": 16,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "num_kv_shared_layers": 0,
}
"""The fields of configs that say sizes, and what they become. A config has some of them."""


def small_config(path: str, trust_remote_code: bool) -> PretrainedConfig:
    """Return the config at ``path`` with small sizes, and as many layers as show every kind.

    ``path`` is a model directory, a Hub name, or a config.json."""
    text = load_config(path, trust_remote_code).get_text_config()
    fields = text.to_dict()
    number = text.num_hidden_layers
    # of some configs the kinds follow from other fields
    kinds = getattr(text, "layer_types", None) or ["alike"] * number
    layers = _layers_of_all_kinds(kinds, fields)
    changes: dict[str, Any] = {
        name: value[:layers]
        for name, value in fields.items()
        if isinstance(value, list) and len(value) == number
    }
    # None means that the model has no such part, or that another field says the size
    changes |= {name: size for name, size in SIZES.items() if fields.get(name) is not None}
    if fields.get("num_key_value_heads") == fields.get("num_attention_heads"):
        changes |= {"num_key_value_heads": SIZES["num_attention_heads"]}  # no groups of queries
    changes["num_hidden_layers"] = layers
    changes["initializer_range"] = WIDTH
    changes |= {f"{name}_token_id": number for number, name in enumerate(SPECIALS)}
    return type(text).from_dict(_of_small_rotary(fields | changes))


def _layers_of_all_kinds(kinds: list[str], fields: dict[str, Any]) -> int:
    """Return the number of first layers that hold every kind of layer of the config, or 2."""
    firsts = [kinds.index(kind) for kind in set(kinds)]
    dense = fields.get("first_k_dense_replace") or 0  # a mixture follows after dense layers
    wanted = max(2, *(first + 1 for first in firsts), 2 if dense else 0)
    return min(wanted, len(kinds), MOST_LAYERS)


def _of_small_rotary(fields: dict[str, Any]) -> dict[str, Any]:
    """Leave out factors of rotary embeddings that are lists over a head's width."""
    rope = fields.get("rope_parameters") or {}
    if any(isinstance(value, list) for value in rope.values()):
        plain = {name: value for name, value in rope.items() if not isinstance(value, list)}
        fields["rope_parameters"] = plain | {"rope_type": "default"}
    return fields


def write_small_model(path: str, directory: Path, trust_remote_code: bool, seed: int = 0) -> None:
    """Write a random model of the shape of ``path`` into ``directory``, in fp32, with a tokenizer
    whose tokens are numbers.

    Raises UserError if its class cannot be built from a small config."""
    logging.set_verbosity_error()
    try:
        config = small_config(path, trust_remote_code)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = language_model_class(config).from_config(config, dtype=torch.float32)
            model.save_pretrained(directory)
        _write_numbers(directory, config.vocab_size)
    except UserError:
        raise
    except Exception as error:  # classes of models raise anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path}: no small model of its shape can be made: {type(error).__name__}: {reason}",
            "the model itself, without --tiny",
        ) from error


def _write_numbers(directory: Path, size: int) -> None:
    """Write a tokenizer of ``size`` tokens: the special ones, then numbers between spaces."""
    names = [f"<{name}>" for name in SPECIALS]
    words = [*names, *map(str, range(len(names), size))]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": names[0]}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": i, "content": name, "special": True} | plain for i, name in enumerate(names)]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": model,
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {f"{name}_token": f"<{name}>" for name in SPECIALS}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
