"""Memory that processes of one machine share, without a name that could outlive them."""

from __future__ import annotations

import atexit
import mmap
import os
import socket
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

_SHARE_KEPT = 4  # keep buffers of up to 1/4 of the available memory between two syncs


def machine_id() -> str:
    """Return an id that is equal for two processes if one can map what the other shares, i.e. if
    they have the same machine and the same pid namespace."""
    boot, processes = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if boot.exists():
        return f"{boot.read_text().strip()} {processes.readlink()}"
    return socket.gethostname()


@dataclass
class _Slot:
    descriptor: int
    path: str
    data: Tensor  # (capacity,) uint8
    lasting: bool  # later syncs reuse the memory, so readers should keep it mapped


class SharedSlots:
    """Buffers that each sync fills one after another and shares by path.

    Allocating new pages costs several times as much as copying into them. So the next sync reuses
    slots, as long as they take no more than a quarter of the available memory; ``end`` frees the
    others. All memory is freed when the process ends, however it ends."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._used = 0

    def allocate(self, size: int) -> Tensor:
        """Return the next buffer, (size,) uint8. Raises OSError if memory is short."""
        place = self._used
        self._used += 1
        if place == len(self._slots):
            self._slots.append(self._new(size))
        elif len(self._slots[place].data) < size:
            os.close(self._slots[place].descriptor)
            self._slots[place] = self._new(size)
        return self._slots[place].data[:size]

    def last(self, size: int) -> dict[str, Any]:
        """Describe to ``Mapped`` of other processes the ``size`` bytes allocated last."""
        slot = self._slots[self._used - 1]
        return {"path": slot.path, "size": size, "lasting": slot.lasting}

    def end(self) -> None:
        """End a sync, when every reader is done: free the buffers that are not to be kept, and
        start again at the first."""
        for slot in self._slots:
            if not slot.lasting:
                os.close(slot.descriptor)
        self._slots = [slot for slot in self._slots if slot.lasting]
        self._used = 0

    def _new(self, size: int) -> _Slot:
        kept = sum(len(slot.data) for slot in self._slots if slot.lasting)
        lasting = (kept + size) * _SHARE_KEPT <= psutil.virtual_memory().available + kept
        descriptor, path = _anonymous_file()
        os.ftruncate(descriptor, max(size, 1))
        data = torch.frombuffer(mmap.mmap(descriptor, max(size, 1)), dtype=torch.uint8)
        return _Slot(descriptor, path, data[:size], lasting)


class Mapped:
    """The ``SharedSlots`` of other processes, mapped for reading."""

    def __init__(self) -> None:
        self._lasting: dict[tuple[int, int], Tensor] = {}

    def open(self, where: Mapping[str, Any]) -> Tensor:
        """Map the bytes that ``SharedSlots.last`` describes and return them, (size,) uint8. Writing
        to them kills the process. Raises FileNotFoundError once the sharing process is gone."""
        descriptor = os.open(where["path"], os.O_RDONLY)
        try:
            status = os.fstat(descriptor)
            identity = (status.st_dev, status.st_ino)  # the same path may later name other memory
            if identity in self._lasting:
                return self._lasting[identity][: where["size"]]
            pages = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            data = torch.frombuffer(pages, dtype=torch.uint8)
        if where["lasting"]:
            self._lasting[identity] = data
        return data[: where["size"]]


def _anonymous_file() -> tuple[int, str]:
    """Create a file without a directory entry. Returns its descriptor and the path under which
    processes of this machine can open it. Without memfd (not on Linux), a temporary file that is
    deleted at exit takes its place."""
    if hasattr(os, "memfd_create"):  # Linux; not limited by the size of /dev/shm
        descriptor = os.memfd_create("openrl-weights")
        return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"
    descriptor, path = tempfile.mkstemp(prefix="openrl-weights-")
    atexit.register(Path(path).unlink, missing_ok=True)
    return descriptor, path
