"""Merging a LoRA adapter (https://arxiv.org/abs/2106.09685) into the model it was trained on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import load_peft_weights
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from openrl.config.groups.model import LoadFlags, WeightFlags
from openrl.errors import UserError
from openrl.models.causal_lm import DTYPES, Loading, load_pretrained
from openrl.models.scalar_model import HEAD_FIELD, stored_head
from openrl.models.stored import load_config
from openrl.models.towers import language_model_class

HEAD = "score"  # the name that transformers' sequence classifiers use


def merge_adapter(
    base: str, adapter: str, output: Path, flags: WeightFlags, head_prefix: str | None
) -> PreTrainedModel:
    """Merge base and adapter, write the result as one model with the base's tokenizer, and return
    it. It is a reward model with the head ``head_prefix``, or without one a language model.

    The sum is computed in fp32 and rounded once, to --param_dtype. The directory appears whole or
    not at all. Raises UserError if the adapter does not fit the base.
    """
    exact = LoadFlags(**{**vars(flags), "param_dtype": "fp32"})
    if head_prefix is None:
        kind = language_model_class(load_config(base, flags.trust_remote_code))
        model = load_pretrained(kind, base, Loading(exact, "cpu"))
    else:
        model = _reward_model(base, adapter, exact, head_prefix)
    merged = _apply(model, adapter, base).to(DTYPES[flags.param_dtype])
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=flags.trust_remote_code)
    aside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        merged.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        os.replace(aside, output)  # also replaces an empty directory
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return merged


def _reward_model(base: str, adapter: str, flags: LoadFlags, prefix: str) -> PreTrainedModel:
    """Load the base as a classifier with one output. Raises UserError if no head is stored."""
    loading = Loading(flags, "cpu", settings={"num_labels": 1})
    model = load_pretrained(AutoModelForSequenceClassification, base, loading, f"{HEAD}.weight")
    if not hasattr(model, HEAD):
        raise UserError(f"{type(model).__name__} has no head named {HEAD}", "another architecture")
    name, weight = stored_head(base, flags, prefix)
    if weight is not None:
        with torch.no_grad():
            model.get_submodule(HEAD).weight.copy_(weight)
    elif not any(f"{HEAD}." in key for key in load_peft_weights(adapter, device="cpu")):
        raise UserError(
            f"neither {base} ({name}.weight) nor {adapter} holds a scalar head: this is not a"
            " reward model",
            "--value_head_prefix with the head's name, or leave --is_rm out",
        )
    setattr(model.config, HEAD_FIELD, HEAD)
    return model


def _apply(model: PreTrainedModel, adapter: str, base: str) -> PreTrainedModel:
    """Return the model with the adapter added. Raises UserError unless every stored tensor fits."""
    stored = load_peft_weights(adapter, device="cpu")
    try:
        with_adapter = PeftModel.from_pretrained(model, adapter)
    # wrong sizes, unknown target modules, unknown kinds of adapter
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--lora_path: {adapter} does not fit {base}: {error}", "the base it was trained on"
        ) from error
    placed = get_peft_model_state_dict(with_adapter)
    if wrong := sorted(placed.keys() ^ stored.keys()):
        raise UserError(
            f"--lora_path: {adapter} does not fit {base}: {len(wrong)} tensors without a"
            f" counterpart, e.g. {wrong[0]}",
            "the base it was trained on",
        )
    return with_adapter.merge_and_unload(safe_merge=True)  # safe_merge refuses NaN
