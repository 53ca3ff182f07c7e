"""Vision towers: which part of a model is one, and the class that loads a model with one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion

from openrl.errors import UserError
from openrl.vision.processor import sees


def language_model_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers that loads a model with its output head."""
    return AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM


def empty_model(config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """Return a language model whose weights have shapes but no memory."""
    with torch.device("meta"):
        return language_model_class(config).from_config(config, trust_remote_code=trust_remote_code)


def require_backbone(model: PreTrainedModel, path: str) -> None:
    """Raise UserError if a model has no backbone apart from its output head, as Llama 4's have
    none: its hidden states would be out of reach."""
    if model.base_model is model:
        raise UserError(
            f"{path}: a {type(model).__name__} has no backbone apart from its output head, so it"
            " cannot be trained here",
            "a model of another architecture",
        )


def tower_parameters(hf: PreTrainedModel) -> list[str]:
    """Return the names of the parameters outside the language model and its output head."""
    if not sees(hf.config):
        return []
    text = {id(p) for p in hf.get_decoder().parameters()}
    head = hf.get_output_embeddings()
    text |= {id(p) for p in head.parameters()} if head is not None else set()
    return [name for name, p in hf.named_parameters() if id(p) not in text]


def tower_modules(hf: PreTrainedModel) -> str | None:
    """Return a regular expression for the modules outside the language model; None without a
    tower."""
    if not sees(hf.config):
        return None
    body, text = hf.base_model, hf.get_decoder()
    others = [name for name, child in body.named_children() if child is not text]
    return rf"(.*\.)?({'|'.join(others)})(\..*)?"


def tower_weights(hf: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters of ``tower_parameters``, named as in a checkpoint."""
    tower = {*tower_parameters(hf)}
    own = {name: p.detach() for name, p in hf.named_parameters() if name in tower}
    return revert_weight_conversion(hf, own) if own else {}
