"""The code that runs inside vLLM's worker processes, next to the model.

vLLM imports this module by its dotted name and adds the methods of ``WorkerExtension`` to its
worker class. The import also registers the weight-transfer engine there (``vllm_transfer.py``)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config

from openrl.models.process_memory import free_pages, memory_use
from openrl.rollout_engines.vllm_transfer import BucketTransfer, Refused

# vLLM's bf16 attention uses AMX tiles without requesting them from the operating system. Unless
# something else in the process has done so, it dies of an illegal instruction. This call requests
# them; on a CPU without AMX it does nothing.
torch.cpu._init_amx()


class WorkerExtension:
    """Methods that vLLM mixes into its workers (``vllm.v1.worker``). The attributes declared here
    belong to those workers."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    weight_transfer_engine: BucketTransfer
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any

    def openrl_gpu(self) -> str:
        """Return the UUID of the GPU that holds this worker's share of the model."""
        from openrl.weights.cuda_ipc import gpu_uuid

        return gpu_uuid(self.device)

    def openrl_unlink_shared_memory(self) -> None:
        """Remove the names of the shared memory through which the workers of a divided engine talk
        on a CPU, since vLLM leaves them behind. All workers have opened it."""
        engine = os.environ.get("VLLM_DIST_IDENT", "")
        for path in Path("/dev/shm").glob(f"{engine}-*-cpushm_*") if engine else ():
            path.unlink(missing_ok=True)

    def openrl_load_weights(
        self, messages: list[dict[str, Any]], first: bool, last: bool
    ) -> dict[str, list[str]]:
        """Load some buckets (see ``SentBucket.message``) of a weight update. With ``first`` the
        session starts before them, with ``last`` it ends after them.

        Returns a report with three lists. "lost" says why buckets could not be opened, and
        "changed" names tensors that arrived corrupted; if there are any, none of these buckets is
        loaded. "absent" names the engine's parameters that got no weight, once the session has
        ended.

        For unknown names or shapes vLLM raises its own errors; the model is then half loaded and
        must not be used. Replicas of one engine raise RuntimeError instead of reporting problems,
        since vLLM only returns the first replica's report."""
        report: dict[str, list[str]] = {"lost": [], "changed": [], "absent": []}
        with set_current_vllm_config(self.vllm_config):
            if first:
                self.start_weight_update()
            try:
                if messages:
                    self.update_weights({"messages": messages})
                if last:
                    self.finish_weight_update()
                    report["absent"] = [*self.weight_transfer_engine.absent]
            except Refused as refused:
                report |= {"lost": refused.lost, "changed": refused.changed}
        if any(report.values()) and self.vllm_config.parallel_config.data_parallel_size > 1:
            raise RuntimeError(
                "; ".join(f"{kind}: {', '.join(found)}" for kind, found in report.items() if found)
            )
        return report

    def openrl_memory(self) -> dict[str, int | None]:
        """Return this worker's memory use as the fields of ``MemoryUse``."""
        return vars(memory_use(self.device.type))

    def openrl_free_cache(self) -> int:
        """Give the pages of the key-value cache back to the system, on a CPU. Returns their size in
        bytes."""
        return free_pages(self.model_runner.kv_caches)
