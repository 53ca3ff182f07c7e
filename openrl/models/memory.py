"""Memory: how much of its GPU and its host a process uses, and what the garbage collector scans."""

from __future__ import annotations

import atexit
import gc
from dataclasses import dataclass

import psutil
import torch


@dataclass(frozen=True)
class MemoryUse:
    """Memory use in bytes; the GPU's figures are None without one."""

    host: int  # resident, of the process and its descendants
    allocated: int | None = None  # of the GPU, by torch, for tensors
    reserved: int | None = None  # of the GPU, by torch, for tensors and as a cache
    free: int | None = None  # of the GPU, whoever uses the rest


def memory_use(device: str) -> MemoryUse:
    """Return the memory use of this process now. The ``device`` "cuda" must be in use already."""
    process = psutil.Process()
    host = sum(_resident(p) for p in [process, *process.children(recursive=True)])
    if device != "cuda":
        return MemoryUse(host)
    free, _ = torch.cuda.mem_get_info()
    return MemoryUse(host, torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), free)


def freeze_gc_heap() -> None:
    """Tell the garbage collector to leave alone everything that exists now. Call it once a process
    has started: these objects live as long as the process, and one full scan of the objects of vLLM
    and Ray takes up to a second in the middle of a rollout."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # some libraries report what is still frozen at exit as leaked


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:  # ended meanwhile
        return 0
