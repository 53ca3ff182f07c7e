"""Runs inside vLLM's worker process, next to the model.

vLLM adds the methods of ``WorkerExtension`` to its worker class, by this module's dotted name;
importing it makes the weight-transfer engine known there (``vllm_transfer.py``)."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import set_current_vllm_config

from openrl.models.memory import memory_use
from openrl.rollout.pages import free_pages
from openrl.rollout.vllm_transfer import BucketTransfer, Refused

# vLLM's attention in bf16 uses the tiles of AMX, and does not ask the kernel for them: where
# nothing else in its process has, it dies of an illegal instruction. Nothing happens on a CPU
# without them.
torch.cpu._init_amx()


class WorkerExtension:
    """Mixed into ``vllm.v1.worker`` workers; the attributes and methods declared here are
    theirs."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    weight_transfer_engine: BucketTransfer
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any

    def openrl_gpu(self) -> str:
        """UUID of the GPU that holds this worker's share of the model."""
        from openrl.weights.cuda_ipc import gpu_uuid

        return gpu_uuid(self.device)

    def openrl_load_weights(
        self, messages: list[dict[str, Any]], first: bool, last: bool
    ) -> dict[str, list[str]]:
        """A part of a weight update in one call: buckets (see ``SentBucket.message``), with the
        start of the session before the ``first`` and its end after the ``last``.

        Returns {"lost": why a bucket could not be opened, "changed": tensors that arrived other
        than they were sent; nothing of these buckets is then loaded. "absent": with the last,
        engine parameters that got no weight}. Raises what vLLM raises for names or shapes that it
        does not know; the model is then half loaded and must not be used. Replicas of one engine
        raise RuntimeError instead of a report: vLLM hands on that of the first replica alone."""
        report = self._openrl_load(messages, first, last)
        if any(report.values()) and self.vllm_config.parallel_config.data_parallel_size > 1:
            raise RuntimeError(
                "; ".join(f"{kind}: {', '.join(found)}" for kind, found in report.items() if found)
            )
        return report

    def _openrl_load(
        self, messages: list[dict[str, Any]], first: bool, last: bool
    ) -> dict[str, list[str]]:
        with set_current_vllm_config(self.vllm_config):
            if first:
                self.start_weight_update()
            try:
                if messages:
                    self.update_weights({"messages": messages})
            except Refused as refused:
                return {"lost": refused.lost, "changed": refused.changed, "absent": []}
            if last:
                self.finish_weight_update()
        return {
            "lost": [],
            "changed": [],
            "absent": list(self.weight_transfer_engine.absent) if last else [],
        }

    def openrl_memory(self) -> dict[str, int | None]:
        """Fields of ``MemoryUse``: what this worker has of its device."""
        return vars(memory_use(self.device.type))

    def openrl_free_cache(self) -> int:
        """On a CPU: give the pages of the key-value cache back to the system. Returns how many
        bytes they span."""
        return free_pages(self.model_runner.kv_caches)
