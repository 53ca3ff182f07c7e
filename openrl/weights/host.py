"""Transport through host memory, which works everywhere. Rank 0 packs each bucket into memory that
the engines on its machine map."""

from __future__ import annotations

from dataclasses import replace
from socket import socket

import torch
from torch import Tensor

from openrl.weights.buckets import Bucket
from openrl.weights.shared_memory import Mapped, SharedSlots, machine_id
from openrl.weights.transport import Route, Sender, SentBucket


class HostSender(Sender):
    """Writes the bytes once. Each engine on another machine gets a copy through the cluster."""

    def __init__(
        self, route: Route, rank: int, device: torch.device, listener: socket | None = None
    ) -> None:
        super().__init__(route, rank, device)
        self._remote = route.remote
        self._slots = SharedSlots()

    def allocate(self, size: int) -> Tensor:
        return self._slots.allocate(size)

    def announce(self, bucket: Bucket) -> SentBucket:
        where = self._slots.last(bucket.data.numel()) | {"machine": machine_id()}
        return SentBucket(bucket.manifest, where, data=bucket.data if self._remote else None)

    def end(self) -> None:
        self._slots.end()


class HostReceiver:
    """A ``Receiver`` that maps the sender's memory."""

    def __init__(self, route: Route, rank: int, device: torch.device) -> None:
        self._mapped = Mapped()

    def open(self, sent: SentBucket) -> Tensor:
        return self._mapped.open(sent.where)


class HostBuffer:
    """Shared memory for buckets that arrive from another machine, so that the processes of this
    machine can map them."""

    def __init__(self) -> None:
        self._slots, self._machine = SharedSlots(), machine_id()

    def local(self, sent: SentBucket) -> SentBucket:
        """Copy a bucket from another machine into memory of this one and return its new
        announcement. Return ``sent`` unchanged if it is local or not in host memory."""
        if sent.where.get("machine", self._machine) == self._machine:
            return sent
        if sent.data is None:
            raise RuntimeError(
                f"weights in the memory of {sent.where['machine']} were not sent to {self._machine}"
            )
        self._slots.allocate(sent.data.numel()).copy_(sent.data)
        where = self._slots.last(sent.data.numel()) | {"machine": self._machine}
        return replace(sent, where=where, data=None)

    def end(self) -> None:
        """Free the buckets of this sync, once they have been read or become void."""
        self._slots.end()
