"""Tiny random models with a tokenizer, made on the spot: a real checkpoint directory in under a
second."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from openrl.config.groups.model import ModelFlags
from openrl.config.groups.rollout_engine import EngineFlags
from openrl.config.groups.vision import PixelFlags
from openrl.rollout_engines.engine import EngineSpec

SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "0123456789 abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN+-*/=():,.\n"
PAD, BOS, EOS, UNK = range(4)

_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that vLLM's CPU attention knows
    "max_position_embeddings": 512,
    # far from uniform: a wrong weight or temperature shows in every log-prob
    "initializer_range": (0.2),
}
_EXTRA = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character."""
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIALS, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **names
    )


def tiny_model_dir(
    tmp: Path,
    *,
    tied: bool = True,
    arch: str = "qwen3",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: object,
) -> Path:
    """A directory below ``tmp`` with a random model (about 0.1M parameters) and its tokenizer.

    ``arch`` is a transformers model type; ``overrides`` are fields of its config.
    """
    tokenizer = tiny_tokenizer()
    ids = {
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "vocab_size": len(tokenizer),
    }
    fields = _SHAPE | _EXTRA.get(arch, {}) | ids | {"tie_word_embeddings": tied} | overrides
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **fields), dtype=dtype)
    path = tmp / f"{arch}-{'tied' if tied else 'untied'}-{seed}"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def tiny_reward_model_dir(
    tmp: Path, *, head_name: str = "score", seed: int = 0, **fields: object
) -> Path:
    """A reward model as training leaves it: a random classifier with one output, its head under
    ``head_name``.

    ``fields`` are further fields of config.json.
    """
    tokenizer = tiny_tokenizer()
    ids = {
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "vocab_size": len(tokenizer),
    }
    config = AutoConfig.for_model(
        "qwen3", **_SHAPE, **ids, num_labels=1, value_head_prefix=head_name, **fields
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    path = tmp / f"reward-{head_name}-{seed}"
    state = {
        name.replace("score.", f"{head_name}."): tensor
        for name, tensor in model.state_dict().items()
    }
    model.save_pretrained(path, state_dict=state)
    tokenizer.save_pretrained(path)
    return path


def rollout_spec(path: Path | str, **settings: Any) -> EngineSpec:
    """What an engine of the model at ``path`` starts with. ``settings`` are flags, or fields of the
    spec."""

    def flags(group: type) -> Any:
        return {f.name: settings.pop(f.name) for f in fields(group) if f.name in settings}

    model, engine, images = map(flags, (ModelFlags, EngineFlags, PixelFlags))
    return EngineSpec(
        ModelFlags(pretrain=str(path), **model),
        EngineFlags(**engine),
        PixelFlags(**images),
        **settings,
    )
