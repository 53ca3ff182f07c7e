"""Writes a trained model as a Hugging Face model directory."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save


def write_model(
    directory: Path, hf: PreTrainedModel, weights: dict[str, Tensor], fields: Mapping[str, Any]
) -> None:
    """Write ``weights``, under their checkpoint names, with the config and the custom code of
    ``hf``. ``fields`` are added to config.json. Writes no tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    config = copy(hf.config)
    config.update(dict(fields))
    vars(config).pop("quantization_config", None)  # the weights are written unquantised
    config.save_pretrained(directory)
    if hf.can_generate():
        hf.generation_config.save_pretrained(directory)
    if hf.is_remote_code():
        custom_object_save(hf, directory, config=config)
    save_torch_state_dict(weights, directory, metadata={"format": "pt"})
