"""On shared GPUs: each rank of the trainer packs the bucket on its GPU, and the engine's process
there reads that memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from openrl.weights.buckets import Bucket
from openrl.weights.transport import Rendezvous, Route, SentBucket

# Of the arguments of torch's rebuild_cuda_tensor, those that differ between buckets: all are
# builtin types.
_FIELDS = slice(7, 10)  # handle of the allocation, size of the storage, its place in the allocation
# handle and place of its reference counter, handle of the event that ends the packing, whether to
# wait
_COUNTER = slice(11, 15)


def gpu_uuid(device: torch.device) -> str:
    """The physical GPU behind a device number: the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def export(data: Tensor) -> list[Any]:
    """A (n,) uint8 tensor on a GPU as builtin types. Its memory stays until the one process that
    ``rebuild``s it lets go, also if ``data`` is dropped here before."""
    _, arguments = reduce_tensor(data)
    return [data.numel(), data.storage_offset(), *arguments[_FIELDS], *arguments[_COUNTER]]


def rebuild(fields: list[Any], device: torch.device) -> Tensor:
    """The memory that another process exported, on the same physical GPU."""
    size, offset, *rest = fields
    storage, counter = rest[:3], rest[3:]
    typed, kind = torch.storage.TypedStorage, torch.uint8
    return rebuild_cuda_tensor(
        Tensor, (size,), (1,), offset, typed, kind, device.index or 0, *storage, False, *counter
    )  # False: needs no gradient


class Sender:
    """See ``transport.Sender``. All ranks pack; rank 0 announces where those with an engine on
    their GPU have their copy."""

    packs = True

    def __init__(
        self, route: Route, rank: int, device: torch.device, rendezvous: Rendezvous | None = None
    ) -> None:
        self._device, self._uuid = device, gpu_uuid(device)
        # memory that is exported and read by nobody stays for ever
        self._has_reader = self._uuid in route.gpus

    def begin(self) -> None:
        pass

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def announce(self, bucket: Bucket) -> SentBucket:
        torch.cuda.synchronize(self._device)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            found, (self._uuid, export(bucket.data)) if self._has_reader else None
        )
        return SentBucket(bucket.manifest, {"gpus": dict(filter(None, found))})

    def deliver(self, bucket: Bucket) -> None:
        pass

    def end(self) -> None:
        torch.cuda.ipc_collect()  # take back what the engines have let go,
        torch.cuda.empty_cache()  # and leave its room to them


class Receiver:
    """See ``transport.Receiver``. The bytes are copied on the GPU: vLLM holds on to tensors until a
    layer is complete, and the trainer is not to wait for that."""

    def __init__(self, route: Route, rank: int, device: torch.device) -> None:
        self._device, self._uuid = device, gpu_uuid(device)

    def open(self, sent: SentBucket) -> Tensor:
        gpus = sent.where["gpus"]
        if self._uuid not in gpus:
            raise RuntimeError(
                f"no rank of the actor shares GPU {self._uuid} with this engine, they have"
                f" {sorted(gpus)}"
            )
        copy = rebuild(gpus[self._uuid], self._device).clone()
        torch.cuda.synchronize(self._device)  # before the trainer's memory is let go
        return copy
