"""Layers with a state in packed rows: gated delta nets, Mamba, short convolutions and the like.

Such a layer carries what it read along the whole row. In a packed row, the part of it that carries
the state runs once for each row that was packed, over just that row's tokens, so nothing can cross;
norms, attention, MLPs and experts still run once for all of them. If rows share their prefix, it
runs again over the prefix before each row's own part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from openrl.models.packing import layers_besides_attention, unpackable

STATE_LAYERS = {"linear_attention", "hybrid", "conv"}  # "hybrid" also has attention
TOKENWISE_LAYERS = {"moe", "mlp"}  # nothing passes between tokens
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "key_places")
"""What ``packing.arrange`` gives to attention about the rows in a packed row."""


def keep_states_apart(path: str, hf: PreTrainedModel) -> None:
    """Make a model's layers with a state start anew with every packed row.

    Raises UserError if it has layers of which the part with the state is not known."""
    kinds = layers_besides_attention(hf.config) - TOKENWISE_LAYERS
    if unknown := kinds - STATE_LAYERS:
        raise unpackable(path, f"layers of type {_listed(unknown)} take all packed rows for one")
    if not kinds:
        return
    layers = getattr(hf.get_decoder(), "layers", ())
    types = hf.config.get_text_config().layer_types
    for layer, kind in zip(layers, types, strict=True):
        if kind in STATE_LAYERS:
            carriers = [module for module in layer.modules() if _carries_state(module)]
            if len(carriers) != 1:
                why = f"the state of its {type(layer).__name__} is not in one known place"
                raise unpackable(path, why)
            _Segments(layer, carriers[0])


def segmented_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that ``keep_states_apart`` found: each runs as often in a forward pass as
    rows are packed, which differs between ranks."""
    return [module for module in model.modules() if isinstance(_segments(module), _Segments)]


def _segments(module: nn.Module) -> object:
    return module.__dict__.get("segments")


def _carries_state(module: nn.Module) -> bool:
    """Tell whether a module mixes tokens by a state: a causal convolution stands before each such
    scan, except in lightning attention."""
    convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
    return convolves or type(module).__name__.endswith("LightningAttention")


class _Segments:
    """Runs one module once for each row in a packed row.

    The layer around it is told the boundaries, and not always the module itself, so a hook of the
    layer hands them on as an argument: gradient checkpointing of either then repeats the same call.
    """

    def __init__(self, layer: nn.Module, module: nn.Module) -> None:
        self._whole: Callable[..., Any] = module.forward
        self._bounds: dict[str, Any] = {}
        module.__dict__["segments"] = self
        module.forward = self._run  # type: ignore[method-assign]
        layer.register_forward_pre_hook(self._learn, with_kwargs=True)
        module.register_forward_pre_hook(self._tell, with_kwargs=True)

    def _learn(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._bounds = {name: kwargs[name] for name in BOUNDARIES if name in kwargs}

    def _tell(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Hand on the boundaries, and the hidden states by position: hooks for the backward pass
        look only there."""
        more = kwargs | self._bounds
        return args or (more.pop("hidden_states"),), more

    def _run(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Take hidden states (1, N, H) of a packed row, or (b, T, H) of a padded one."""
        bounds = {name: kwargs.pop(name) for name in BOUNDARIES if name in kwargs}
        if not bounds:
            return self._whole(hidden_states, *args, **kwargs)
        queries, keys = (bounds[f"cu_seq_lens_{side}"].diff().tolist() for side in "qk")
        places = bounds.get("key_places")
        seen = hidden_states if places is None else hidden_states[:, places]
        found = [
            _last(self._whole(part, *args, **kwargs), count)
            for part, count in zip(seen.split(keys, 1), queries, strict=True)
            if count
        ]
        if isinstance(found[0], tuple):  # and attention weights, which are None
            return torch.cat([output for output, *_ in found], 1), *found[0][1:]
        return torch.cat(found, 1)


def _last(output: Any, count: int) -> Any:
    """Keep the last ``count`` tokens of a module's output."""
    if isinstance(output, tuple):
        return output[0][:, -count:], *output[1:]
    return output[:, -count:]


def _listed(kinds: set[str]) -> str:
    return ", ".join(sorted(kinds))
