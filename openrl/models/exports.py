"""Writing a model directory: the weights first, whatever goes wrong with the rest; then what was
written is compared with what was to be written. What may be refused is tried before a run starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

from openrl.errors import UserError, short
from openrl.models.stored import load_config

Write = Callable[[Path], object]
"""Writes files into a directory."""


def write_files(
    directory: Path,
    hf: PreTrainedModel,
    weights: dict[str, Tensor],
    fields: Mapping[str, Any],
    more: Mapping[str, Write],
) -> list[str]:
    """Write a model into an empty directory: ``weights``, under their checkpoint names, then the
    config with ``fields`` added, the generation config, custom code, and ``more``.

    Return what could not be written besides the weights, and why. Raises OSError if the disk
    takes no more, and UserError if the weights that were written are not ``weights``."""
    save_torch_state_dict(weights, directory, metadata={"format": "pt"})
    check_written(directory, weights)
    config = copy(hf.config)
    config.update(dict(fields))
    vars(config).pop("quantization_config", None)  # the weights are written unquantised
    parts: dict[str, Write] = {"config.json": config.save_pretrained}
    if hf.can_generate():
        parts["generation_config.json"] = hf.generation_config.save_pretrained
    if hf.is_remote_code():
        parts["the model's code"] = lambda place: custom_object_save(hf, place, config=config)
    failed = []
    for name, write in {**parts, **more}.items():
        try:
            write(directory)
        except Exception as error:  # libraries and the model's own code raise anything
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise
            failed.append(f"{name}: {_reason(error)}")
    return failed


def require_all(directory: Path, failed: list[str]) -> None:
    """Raise UserError if something besides the weights could not be written."""
    if failed:
        message = f"the trained weights are in {directory}, but not all that belongs to them"
        raise UserError(
            "\n  ".join([f"{message}:", *failed]), "copy these files from the base model"
        )


def check_written(directory: Path, weights: Mapping[str, Tensor]) -> None:
    """Raise UserError unless the files in ``directory`` hold exactly these weights."""
    found: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                if name not in weights or not _same(stored.get_tensor(name), weights[name]):
                    raise _differs(directory, name)
                found.add(name)
    if missing := weights.keys() - found:
        raise _differs(directory, min(missing))


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same, NaN included."""
    return one.dtype == other.dtype and (
        torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def _differs(directory: Path, name: str) -> UserError:
    message = f"{directory}: {name} was not written as it was trained"
    return UserError(message, "another disk; a checkpoint of the run can be exported again")


def check_export(path: str, trust_remote_code: bool, generates: bool = True) -> None:
    """Raise UserError if transformers refuses to save the config or, of a model that ``generates``,
    the generation config at ``path``, as the export at the end does."""
    config = load_config(path, trust_remote_code)
    try_to_save("config.json", path, config.save_pretrained)
    if generates:
        try:
            generation = GenerationConfig.from_pretrained(path)
        except (OSError, ValueError):  # there is none, so the model makes one
            generation = GenerationConfig.from_model_config(config)
        try_to_save("generation_config.json", path, generation.save_pretrained)


def check_tokenizer_saves(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError if the tokenizer cannot be saved."""
    path = tokenizer.name_or_path
    try_to_save("tokenizer", path, lambda place: tokenizer.save_pretrained(place))


def try_to_save(what: str, path: str, write: Write) -> None:
    """Raise UserError if ``write`` cannot write ``what`` of the model at ``path``."""
    with TemporaryDirectory() as directory:
        try:
            write(Path(directory))
        except Exception as error:  # libraries and the model's own code raise anything
            message = f"{path}: its {what} cannot be saved with the trained model"
            raise UserError(f"{message}: {_reason(error)}", f"mend the {what}") from error


def _reason(error: Exception) -> str:
    return short(f"{type(error).__name__}: {' '.join(str(error).split())}", 400)[1:-1]
