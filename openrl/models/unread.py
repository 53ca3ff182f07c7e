"""Stored tensors that no parameter of a model takes. transformers leaves them out without a word;
here they are named, unless a reason stands below."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable

import torch
from transformers import AutoModel, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from openrl.errors import counted, listed

IGNORED = {
    r"rotary_emb\.inv_freq$": "the frequencies follow from the config",
    r"(^|\.)position_ids$": "the numbers 0, 1, 2, ...",
    r"\.(attn|attention|self_attn)\.(masked_)?bias$": "masks of early versions",
    r"(^|\.)mtp\.": "layers that guess several tokens at once, which are not trained",
}
"""Patterns of names that may be left out of any model, and why."""

HEADS = {
    r"^(score|v_head|value_head|reward_head|regression_head)\.": "a head of rewards or values",
}
"""What may be left out of a language model."""

OUTPUTS = {r"^(lm_head|embed_out|output)\.": "the output head of a language model"}
"""What may be left out of a critic or reward model."""


def unread(model: PreTrainedModel, stored: Iterable[str]) -> list[str]:
    """Return the names of stored tensors for which ``model`` has no parameter and no buffer,
    by the renamings that transformers makes. The model may be without memory."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    known = model._keys_to_ignore_on_load_unexpected or ()

    def takes(name: str) -> bool:
        renamed, _ = rename_source_key(name, renamings, converters, prefix, state)
        plain, _ = rename_source_key(name, [], [], prefix, state)
        ignored = any(re.search(pattern, key) for pattern in known for key in (name, renamed))
        return renamed in state or plain in state or ignored

    return [name for name in stored if not takes(name)]


def warn_of_unread(
    path: str, model: PreTrainedModel, stored: Iterable[str], allowed: dict[str, str]
) -> None:
    """Warn of stored tensors that ``model`` does not take and that are not ``allowed`` to stay."""
    reasons = re.compile("|".join([*IGNORED, *allowed]))
    if names := [name for name in unread(model, stored) if not reasons.search(name)]:
        warnings.warn(
            f"{path}: the model has no parameter for {counted(len(names), 'stored tensor')}, left"
            f" out: {listed(names, 5)}",
            stacklevel=2,
        )


def empty_backbone(config: PretrainedConfig) -> PreTrainedModel:
    """Return the backbone of a critic or reward model, whose weights have no memory."""
    with torch.device("meta"):
        return AutoModel.from_config(config)
