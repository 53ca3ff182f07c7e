"""Transport by CUDA IPC, for GPUs that trainer and engines share. Each rank of the trainer packs
the bucket on its GPU, and the engine's process on that GPU reads the memory."""

from __future__ import annotations

from socket import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from openrl.weights.buckets import Bucket
from openrl.weights.transport import Route, Sender, SentBucket

# Slices of the arguments of torch's rebuild_cuda_tensor that differ between buckets. All of them
# are of builtin types.
_FIELDS = slice(7, 10)  # allocation handle, storage size, offset of the storage in the allocation
# handle and offset of the reference counter, handle of the event after packing, whether to wait
# for that event
_COUNTER = slice(11, 15)


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of the physical GPU behind a device number, the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def export(data: Tensor) -> list[Any]:
    """Describe an (n,) uint8 tensor on a GPU in builtin types. Its memory lives until the one
    process that calls ``rebuild`` frees it, even if ``data`` is dropped here earlier."""
    _, arguments = reduce_tensor(data)
    return [data.numel(), data.storage_offset(), *arguments[_FIELDS], *arguments[_COUNTER]]


def rebuild(fields: list[Any], device: torch.device) -> Tensor:
    """Return the tensor that another process exported from the same physical GPU."""
    size, offset, *rest = fields
    storage, counter = rest[:3], rest[3:]
    typed, kind = torch.storage.TypedStorage, torch.uint8
    return rebuild_cuda_tensor(
        Tensor, (size,), (1,), offset, typed, kind, device.index or 0, *storage, False, *counter
    )  # False: requires_grad


class IpcSender(Sender):
    """All ranks pack. Rank 0 announces the memory of every rank that shares its GPU with an
    engine."""

    def __init__(
        self, route: Route, rank: int, device: torch.device, listener: socket | None = None
    ) -> None:
        super().__init__(route, rank, device)
        self.packs, self._uuid = True, gpu_uuid(device)
        # exported memory that nobody reads is never freed
        self._has_reader = self._uuid in route.gpus

    def announce(self, bucket: Bucket) -> SentBucket:
        torch.cuda.synchronize(self.device)
        found: list[Any] = [None] * dist.get_world_size()
        own = (self._uuid, export(bucket.data)) if self._has_reader else None
        dist.all_gather_object(found, own)
        return SentBucket(bucket.manifest, {"gpus": dict(filter(None, found))})

    def end(self) -> None:
        torch.cuda.ipc_collect()  # reclaim the memory that the engines have released
        torch.cuda.empty_cache()  # and return it to the device, for the engines to use


class IpcReceiver:
    """A ``Receiver`` that copies the bytes on the GPU. vLLM holds on to tensors until a
    layer is complete, and the trainer should not wait for that."""

    def __init__(self, route: Route, rank: int, device: torch.device) -> None:
        self._device, self._uuid = device, gpu_uuid(device)

    def open(self, sent: SentBucket) -> Tensor:
        gpus = sent.where["gpus"]
        if self._uuid not in gpus:
            problem = f"no rank of the actor shares GPU {self._uuid} with this engine"
            raise RuntimeError(f"{problem}, they have {sorted(gpus)}")
        copy = rebuild(gpus[self._uuid], self._device).clone()
        torch.cuda.synchronize(self._device)  # finish the copy before the trainer frees its memory
        return copy
