"""Runs inside vLLM's worker process, next to the model: receives and loads synchronised weights.

vLLM adds the methods of ``WeightSyncExtension`` to its worker class, by this module's dotted name. Loading is a session of
vLLM's layerwise reload, the one that its own weight-transfer engines run; those engines themselves are not used, because
what they are built from and what they are sent differs from version to version, and they report nothing back.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn

from openrl.models.memory import memory_use
from openrl.rollout.pages import free_pages
from openrl.weights.buckets import Bucket
from openrl.weights.transport import Receiver, Route, changed_on_the_way, make_receiver, read_message


class WeightSyncExtension:
    """Mixed into ``vllm.v1.worker`` workers; the attributes declared here are theirs."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    rank: int  # among the workers of this engine

    def openrl_gpu(self) -> str:
        """UUID of the GPU that holds this worker's share of the model."""
        from openrl.weights.cuda_ipc import gpu_uuid

        return gpu_uuid(self.device)

    def openrl_connect(self, route: dict[str, Any], first_rank: int) -> None:
        """``first_rank`` is that of this engine's first worker in the group of a broadcast."""
        self._openrl_receiver: Receiver = make_receiver(Route(**route), first_rank + self.rank, self.device)

    def openrl_load_weights(self, messages: list[dict[str, Any]], first: bool, last: bool) -> dict[str, list[str]]:
        """Load buckets (see ``SentBucket.message``), the ``first`` and the ``last`` of a sync among them or not.

        Returns {"lost": why a bucket could not be opened, "changed": tensors that arrived other than they were sent;
        nothing of these buckets is then loaded. "absent": with the last, engine parameters that got no weight}. Raises
        what vLLM raises for names or shapes that it does not know; the model is then half loaded and must not be used.
        Replicas of one engine raise RuntimeError instead of a report: vLLM hands on that of the first replica alone.
        """
        report = self._openrl_load(messages, first, last)
        if any(report.values()) and self.vllm_config.parallel_config.data_parallel_size > 1:
            raise RuntimeError("; ".join(f"{kind}: {', '.join(found)}" for kind, found in report.items() if found))
        return report

    def _openrl_load(self, messages: list[dict[str, Any]], first: bool, last: bool) -> dict[str, list[str]]:
        from vllm.config import set_current_vllm_config

        sent = [read_message(message) for message in messages]
        try:
            buckets = [Bucket(one.manifest, self._openrl_receiver.open(one)) for one in sent]
        except OSError as error:
            return {"lost": [str(error)], "changed": [], "absent": []}
        changed = [name for one, bucket in zip(sent, buckets, strict=True) for name in changed_on_the_way(one, bucket)]
        if changed:
            return {"lost": [], "changed": changed, "absent": []}
        with set_current_vllm_config(self.vllm_config):
            if first:
                self._openrl_session = _Session(self.model_runner.get_model())
            self._openrl_session.load(buckets)
            absent = self._openrl_session.end(self.vllm_config.model_config) if last else []
            return {"lost": [], "changed": [], "absent": absent}

    def openrl_memory(self) -> dict[str, int | None]:
        """Fields of ``MemoryUse``: what this worker has of its device."""
        return vars(memory_use(self.device.type))

    def openrl_free_cache(self) -> int:
        """On a CPU: give the pages of the key-value cache back to the system. Returns how many bytes they span."""
        return free_pages(self.model_runner.kv_caches)


class _Session:
    """One replacement of all weights of a model, in any number of parts."""

    def __init__(self, model: nn.Module) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._model = model
        self._wanted = {parameter_key(name) for name, _ in model.named_parameters()}
        self._loaded: set[str] | None = set()  # None: the model does not tell
        _forget_expert_kernels(model)
        initialize_layerwise_reload(model)

    def load(self, buckets: list[Bucket]) -> None:
        if not buckets:
            return
        loaded = self._model.load_weights(chain.from_iterable(bucket.tensors() for bucket in buckets))
        self._loaded = (
            None if self._loaded is None or loaded is None else self._loaded | set(map(parameter_key, loaded))
        )

    def end(self, model_config: Any) -> list[str]:
        """Names of parameters that got no weight; vLLM itself only logs them."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._model, model_config)
        _repack_heads(self._model)
        return [] if self._loaded is None else sorted(self._wanted - self._loaded)


def parameter_key(name: str) -> str:
    """A parameter as every ``load_weights`` may name it: of experts vLLM 0.28 leaves the inner module out, 0.32 does not."""
    return name.replace(".routed_experts.", ".")


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
