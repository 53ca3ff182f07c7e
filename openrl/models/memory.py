"""How much memory a process has of its GPU and of its host, and what the garbage collector looks
at."""

from __future__ import annotations

import atexit
import gc
from dataclasses import dataclass

import psutil
import torch


@dataclass(frozen=True)
class MemoryUse:
    """Bytes. None without a GPU."""

    host: int  # resident, of the process and of those it started
    allocated: int | None = None  # of the GPU by torch: tensors
    reserved: int | None = None  # of the GPU by torch: tensors and what it keeps for more
    free: int | None = None  # of the GPU, whoever uses the rest


def memory_use(device: str) -> MemoryUse:
    """Of this process now. ``device``: "cpu" or "cuda"; the latter must have been used before."""
    process = psutil.Process()
    host = sum(_resident(p) for p in [process, *process.children(recursive=True)])
    if device != "cuda":
        return MemoryUse(host)
    return MemoryUse(
        host,
        torch.cuda.memory_allocated(),
        torch.cuda.memory_reserved(),
        free=torch.cuda.mem_get_info()[0],
    )


def settle() -> None:
    """Call it once a process has started: what there is by now lives as long as the process, and
    the garbage collector leaves it alone from here on. Among the objects of vLLM and Ray one full
    look takes up to a second, mid-rollout."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # what is alive at the end is reported as lost by some libraries


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:  # ended meanwhile
        return 0
