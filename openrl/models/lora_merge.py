"""Merging a LoRA adapter (https://arxiv.org/abs/2106.09685) into the model it was trained on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import load_peft_weights
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from openrl.config.groups.model import LoadFlags, WeightFlags
from openrl.errors import UserError
from openrl.models.causal_lm import DTYPES, Loading, load_pretrained
from openrl.models.exports import require_all, write_files
from openrl.models.scalar_model import HEAD_FIELD, Head, stored_head
from openrl.models.stored import load_config
from openrl.models.towers import language_model_class
from openrl.models.trial import Trial

HEAD = "score"  # the name that transformers' sequence classifiers use
CLOSE = 1e-5  # how far logits may be from those with the adapter, as a share of the largest


def merge_adapter(
    base: str, adapter: str, output: Path, flags: WeightFlags, head_prefix: str | None
) -> PreTrainedModel:
    """Merge base and adapter, write the result as one model with the base's tokenizer, and return
    it as it is read back. It is a reward model with the head ``head_prefix``, or without one a
    language model.

    The sum is computed in fp32 and rounded once, to --param_dtype. The directory appears whole or
    not at all. Raises UserError if the adapter does not fit the base, and if the merged model, or
    what was written, says something else than base and adapter.
    """
    exact = LoadFlags(**{**vars(flags), "param_dtype": "fp32"})
    if head_prefix is None:
        kind = language_model_class(load_config(base, flags.trust_remote_code))
        model = load_pretrained(kind, base, Loading(exact, "cpu"))
    else:
        kind = AutoModelForSequenceClassification
        model = _reward_model(base, adapter, exact, head_prefix)
    merged = _apply(model, adapter, base)
    for parameter in merged.parameters():  # not the buffers, which loading leaves in fp32
        parameter.data = parameter.data.to(DTYPES[flags.param_dtype])
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=flags.trust_remote_code)
    written, trial = _logits(merged), f"{output}: the model that was written"
    aside = output.with_name(f".{output.name}.{os.getpid()}")
    aside.mkdir(parents=True)
    try:
        fields = {"architectures": [type(merged).__name__], "dtype": str(merged.dtype)[6:]}
        failed = write_files(
            aside, merged, _checkpoint(merged), fields, {"tokenizer": tokenizer.save_pretrained}
        )
        del merged, model  # the one that is read back needs their memory
        if not failed:
            read = LoadFlags(**vars(flags))
            found = load_pretrained(kind, str(aside), Loading(read, "cpu"))
            if head_prefix is not None:
                _set_head(found, stored_head(str(aside), read, HEAD))
            _require_equal(written, _logits(found), trial)
        os.replace(aside, output)  # also replaces an empty directory
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    require_all(output, failed)
    return found


def _checkpoint(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights under their checkpoint names, tied ones once."""
    held = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    weights = {name: model.state_dict()[name] for name in reversed(held.values())}
    return {name: t.contiguous() for name, t in revert_weight_conversion(model, weights).items()}


def _reward_model(base: str, adapter: str, flags: LoadFlags, prefix: str) -> PreTrainedModel:
    """Load the base as a classifier with one output. Raises UserError if no head is stored."""
    loading = Loading(flags, "cpu", settings={"num_labels": 1})
    model = load_pretrained(AutoModelForSequenceClassification, base, loading, f"{HEAD}.weight")
    if not hasattr(model, HEAD):
        raise UserError(f"{type(model).__name__} has no head named {HEAD}", "another architecture")
    head, trained = stored_head(base, flags, prefix), load_peft_weights(adapter, device="cpu")
    _set_head(model, head, any(key.endswith(f"{HEAD}.bias") for key in trained))
    if head.weight is None and not any(f"{HEAD}." in key for key in trained):
        raise UserError(
            f"neither {base} ({head.name}.weight) nor {adapter} holds a scalar head: this is not a"
            " reward model",
            "--value_head_prefix with the head's name, or leave --is_rm out",
        )
    setattr(model.config, HEAD_FIELD, HEAD)
    return model


def _set_head(model: PreTrainedModel, head: Head, biased: bool = False) -> None:
    """Set the head of a classifier of transformers, whose own has no bias. It gets one if ``head``
    has one, and if it is to be ``biased``."""
    if head.bias is not None or biased:
        size = model.get_submodule(HEAD).in_features
        setattr(model, HEAD, nn.Linear(size, 1, dtype=model.dtype))
    head.copy_to(model.get_submodule(HEAD))


def _apply(model: PreTrainedModel, adapter: str, base: str) -> PreTrainedModel:
    """Return the model with the adapter added. Raises UserError unless every stored tensor fits,
    and the merged model says the same."""
    stored = load_peft_weights(adapter, device="cpu")
    _require_same_vocabulary(model, stored, adapter, base)
    tied = _untie(model)
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
    expected = _logits(with_adapter)
    merged = with_adapter.merge_and_unload(safe_merge=True)  # safe_merge refuses NaN
    if tied:
        _tie_again(merged)
    _require_equal(expected, _logits(merged), f"--lora_path: {adapter} merged into {base}")
    return merged


def _require_same_vocabulary(
    model: PreTrainedModel, stored: dict[str, Tensor], adapter: str, base: str
) -> None:
    """Raise UserError if the adapter holds an embedding of another number of tokens."""
    embedding = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embedding)
    tokens = len(embedding.weight)
    for key, tensor in stored.items():
        if key.endswith(f"{name}.weight") and len(tensor) != tokens:
            raise UserError(
                f"--lora_path: {adapter} has an embedding of {len(tensor)} tokens, {base} one of"
                f" {tokens}: tokens were added to it before the adapter was trained",
                "--model_path with a copy of it, saved after"
                f" resize_token_embeddings({len(tensor)}) together with the adapter's tokenizer",
            )


def _untie(model: PreTrainedModel) -> bool:
    """Give an output head that is the embedding a copy of its own, since an adapter may change
    only one of them. Return whether it was the embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return False
    head.weight = nn.Parameter(embedding.weight.detach().clone())
    _set_tied(model, False)
    return True


def _tie_again(model: PreTrainedModel) -> None:
    """Make head and embedding one again, if no adapter has changed either."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight
        _set_tied(model, True)


def _set_tied(model: PreTrainedModel, tied: bool) -> None:
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = tied


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    """Return what the model makes of a few tokens, in fp32."""
    config = model.config
    trial = Trial.of(config, torch.float32)
    return trial.probe(lambda ids, mask: model(input_ids=ids, attention_mask=mask.long()).logits)


def _require_equal(expected: Tensor, found: Tensor, what: str) -> None:
    gap = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    if not gap <= CLOSE:
        raise UserError(
            f"{what} gives other logits than base and adapter ({gap:.2g} of the largest)",
            "another adapter: this one has parts that cannot be merged",
        )
