"""Changes to a model by flags, adapters aside: fields of its config, frozen parameters, kernels."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from openrl.config.groups.model import ModelChangeFlags
from openrl.errors import ErrorCollector, UserError
from openrl.models.experts import expert_count
from openrl.models.stored import ROPE, load_config
from openrl.models.towers import empty_model

OWN_FLAGS = {
    "dtype": "--param_dtype",
    "torch_dtype": "--param_dtype",
    "attn_implementation": "--attn_implementation",
    "model_type": "--pretrain",
}


def load_settings(changes: ModelChangeFlags) -> dict[str, Any]:
    """Return the arguments for ``from_pretrained``."""
    if changes.experts_implementation is None:
        return changes.model_config_overrides
    own = {"experts_implementation": changes.experts_implementation}
    return changes.model_config_overrides | own


def check_changes(path: str, changes: ModelChangeFlags, trust_remote_code: bool) -> None:
    """Raise UserError for all that the model at ``path`` does not have, by its config alone."""
    if changes == ModelChangeFlags():
        return
    config = load_config(path, trust_remote_code)
    collector = ErrorCollector()
    for name, value in changes.model_config_overrides.items():
        with collector:
            _check_field(path, config, name, value)
    with collector:
        if changes.experts_implementation and not expert_count(config.get_text_config()):
            raise UserError(f"--experts_implementation: {path} has no experts", "leave it out")
    with collector:
        if changes.freeze_modules is not None:
            names = (name for name, _ in empty_model(config, trust_remote_code).named_parameters())
            frozen_names(path, names, changes.freeze_modules)
    collector.raise_all()


def _check_field(path: str, config: Any, name: str, value: Any) -> None:
    if name in OWN_FLAGS:
        raise UserError(f"--model_config_overrides: {name} has its own flag", OWN_FLAGS[name])
    if not hasattr(config, name):
        near = get_close_matches(name, vars(config), 1)
        problem = f"--model_config_overrides: the config of {path} has no field {name!r}"
        raise UserError(problem, f"{near[0]!r}" if near else "")
    own = getattr(config, name)
    if name in ROPE and value and "rope_theta" in str(own) and "rope_theta" not in str(value):
        problem = f"--model_config_overrides: {name} replaces the model's, and has no rope_theta"
        raise UserError(problem, f"what the model has, and what changes: {own}")


def frozen_names(path: str, names: Iterable[str], pattern: str) -> list[str]:
    """Return the names that ``pattern`` matches. Raises UserError if it matches none or all."""
    given = list(names)
    found = [name for name in given if re.search(pattern, name)]
    if len(found) in (0, len(given)):
        problem = f"matches {'every' if found else 'no'} parameter of {path}"
        example = f"names are such as {given[len(given) // 2]}"
        raise UserError(f"--freeze_modules {pattern} {problem}", example)
    return found


def freeze(model: nn.Module, pattern: str, prefix: str = "") -> None:
    """Freeze the parameters that ``pattern`` matches. ``model`` holds a backbone as ``hf``, which a
    language model of its architecture names ``prefix``. Raises UserError if nothing is left to
    train."""
    for name, parameter in model.named_parameters():
        if re.search(pattern, prefix + name.removeprefix("hf.")):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            f"--freeze_modules {pattern} leaves nothing to train", "a narrower expression"
        )


def use_liger_kernels(hf: PreTrainedModel) -> None:
    """Use Liger kernels for norms, rotary embeddings and MLPs. The loss kernels stay off because
    ``LogprobHead`` replaces the loss. Raises UserError if the package, which only logs this, does
    not know the architecture."""
    from transformers.integrations.liger import apply_liger_kernel  # importing it loads peft

    before = _replaced_forwards(hf)
    apply_liger_kernel(hf, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    if _replaced_forwards(hf) == before:
        raise UserError(
            f"--use_liger_kernel: there are no kernels for {hf.config.model_type}", "leave it out"
        )


def _replaced_forwards(model: nn.Module) -> dict[str, object]:
    own = {name: vars(module).get("forward") for name, module in model.named_modules()}
    return {name: forward for name, forward in own.items() if forward is not None}
