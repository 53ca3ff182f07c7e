"""Runs inside vLLM's worker process, next to the model: loads synchronised weights.

vLLM adds the methods of ``WeightSyncExtension`` to its worker class, by this module's dotted name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from openrl.weights.shared_memory import open_bucket

logger = logging.getLogger(__name__)


class WeightSyncExtension:
    """Mixed into ``vllm.v1.worker`` workers; ``model_runner`` is theirs."""

    model_runner: Any

    def openrl_load_weights(self, files: list[dict[str, Any]]) -> dict[str, list[str]]:
        """Replace the model's weights by those in ``files`` (see ``BucketFile.message``).

        Returns {"absent": engine parameters that got no weight}. Raises what vLLM raises for names or shapes that
        it does not know; the model is then half loaded and must not be used.
        """
        model = self.model_runner.get_model()
        wanted = {name for name, _ in model.named_parameters()}
        _forget_expert_kernels(model)
        loaded = _reload(self.model_runner, model, _tensors(files))
        _repack_heads(model)
        return {"absent": sorted(wanted - loaded) if loaded is not None else []}


def _tensors(files: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        yield from open_bucket(file).tensors()


def _reload(runner: Any, model: nn.Module, weights: Iterator[tuple[str, Tensor]]) -> set[str] | None:
    """``reload_weights``, and the parameters it loaded: vLLM itself only logs those it missed. None: not told."""
    told: list[set[str] | None] = []
    load = model.load_weights

    def recording(*args: Any, **kwargs: Any) -> Any:
        told.append(load(*args, **kwargs))
        return told[-1]

    model.load_weights = recording
    try:
        runner.reload_weights(weights_iterator=weights)
    finally:
        del model.load_weights
    return told[0] if told else None


# vLLM's CPU kernels work on packed copies. A reload packs linear layers again, but neither of the following two.


def _forget_expert_kernels(model: nn.Module) -> None:
    """Mixtures of experts pack when their kernel is built, and it is built once: make the reload build it anew."""
    for module in _on_cpu(model):
        if getattr(module.quant_method, "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


def _repack_heads(model: nn.Module) -> None:
    """An output head tied to the embedding gets no weights of its own, so a reload passes it by."""
    for module in _on_cpu(model):
        if hasattr(module, "cpu_linear") and module.weight.numel():  # numel 0: packed and the original dropped
            module.quant_method.process_weights_after_loading(module)


def _on_cpu(model: nn.Module) -> list[nn.Module]:
    """Modules with a kernel, if the model is on a CPU; CUDA kernels hold no copies."""
    if next(model.parameters()).device.type != "cpu":
        return []
    return [module for module in model.modules() if getattr(module, "quant_method", None) is not None]
