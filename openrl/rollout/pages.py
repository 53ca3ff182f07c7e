"""Frees host memory that is not needed for a while, but keeps its addresses."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable

from torch import Tensor


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
