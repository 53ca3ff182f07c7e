"""Gradient checkpointing: which activations the backward pass recomputes instead of keeping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from openrl.config.groups.deepspeed import DeepSpeedFlags
from openrl.errors import UserError
from openrl.models.stored import load_config
from openrl.models.towers import empty_model

Method = Literal["uniform", "block", "selective", "moe"]


PARTS: dict[str, Callable[[nn.Module], bool]] = {
    "selective": lambda module: type(module).__name__.endswith("Attention"),
    "moe": lambda module: "experts" in dict(module.named_children()),
}
"""Method -> the parts of a layer that it recomputes."""


def recompute(
    hf: PreTrainedModel, method: Method, num_layers: int | None = None, reentrant: bool = False
) -> None:
    """Set up ``method`` for training. Raises UserError if the model does not support it."""
    if not hf.supports_gradient_checkpointing:
        problem = f"--gradient_checkpointing: {type(hf).__name__} does not support it"
        raise UserError(problem, "leave it out")
    layers = [module for module in hf.modules() if isinstance(module, GradientCheckpointingLayer)]
    if method in ("uniform", "block"):
        hf.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for layer in layers[num_layers:] if num_layers else []:
            layer.gradient_checkpointing = False
        # reentrant checkpointing sees gradients only through its inputs, and a frozen embedding
        # gives none
        if reentrant:
            hf.enable_input_require_grads()
        return
    parts = [module for layer in layers for module in layer.modules() if PARTS[method](module)]
    if not parts:
        raise UserError(
            f"--gradient_checkpointing_method {method}: {type(hf).__name__} has no such parts",
            "--gradient_checkpointing_method uniform",
        )
    for part in parts:
        _recompute(part)


def check_recompute(path: str, flags: DeepSpeedFlags, trust_remote_code: bool) -> None:
    """Raise UserError if ``recompute`` would for the model at ``path``; reads only its config."""
    if flags.gradient_checkpointing and flags.gradient_checkpointing_method in PARTS:
        config = load_config(path, trust_remote_code)
        recompute(empty_model(config, trust_remote_code), flags.gradient_checkpointing_method)


def _recompute(part: nn.Module) -> None:
    forward = part.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not (part.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    part.forward = recomputed  # type: ignore[method-assign]
