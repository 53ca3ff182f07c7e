"""Memory: how much of its GPU and its host a process uses, which pages it gives back for a while,
and what the garbage collector scans."""

from __future__ import annotations

import atexit
import ctypes
import gc
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor


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
    and Ray takes up to a second in the middle of a rollout. Garbage among what is frozen already
    stays, unless ``gc.unfreeze`` is called first: in a forked process that copies its memory."""
    gc.collect()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # some libraries report what is still frozen at exit as leaked


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:  # ended meanwhile
        return 0


def free_pages(tensors: Iterable[Tensor]) -> int:
    """Give the pages below these tensors back to the system. Returns their size in bytes.

    The tensors stay valid and read as zeros; the system allocates a page again when it is next
    touched. Pages that they share with other data stay. Raises OSError if the system refuses."""
    libc, freed = ctypes.CDLL(None, use_errno=True), 0
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    for start, size in storages.items():
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if end <= first:
            continue
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), f"madvise: {os.strerror(ctypes.get_errno())}")
        freed += end - first
    return freed
