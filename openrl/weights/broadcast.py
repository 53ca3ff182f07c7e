"""Transport by broadcast, for engines on GPUs of their own. Rank 0 of the trainer and every process
of every engine form a group, and each bucket is one broadcast.

The group is independent of the default process group on either side. On a CPU the same code runs
over gloo, for tests."""

from __future__ import annotations

from datetime import timedelta
from socket import socket

import torch
import torch.distributed as dist
from torch import Tensor

from openrl.weights.buckets import Bucket
from openrl.weights.transport import Route, Sender, SentBucket


def _store(route: Route, listener: int | None = None) -> dist.TCPStore:
    return dist.TCPStore(
        route.address,
        route.port,
        route.world_size,
        listener is not None,
        timedelta(seconds=route.timeout),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


class BroadcastGroup:
    """The process group of a broadcast. Rank 0 sends.

    If a member dies, NCCL lets the others wait: the driver, which learns of the death, ends the
    run."""

    def __init__(self, store: dist.Store, route: Route, rank: int, device: torch.device) -> None:
        """Join the group. Raises TimeoutError with the ranks that did not join within
        ``route.timeout`` seconds, which is also how long a broadcast may take."""
        limit = timedelta(seconds=route.timeout)
        _wait_for_all(store, rank, route.world_size, limit)
        scoped = dist.PrefixStore("weights", store)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(scoped, rank, route.world_size, options)
        else:
            self._group = dist.ProcessGroupGloo(scoped, rank, route.world_size, limit)

    def broadcast(self, data: Tensor) -> None:
        """Copy rank 0's ``data`` into that of the others. Returns once that is done."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([data], options).wait()
        if data.is_cuda:
            torch.cuda.current_stream(data.device).synchronize()


def _wait_for_all(store: dist.Store, rank: int, size: int, limit: timedelta) -> None:
    store.set(f"here/{rank}", "")
    try:
        store.wait([f"here/{other}" for other in range(size)], limit)
    except dist.DistStoreError as error:
        missing = [str(other) for other in range(size) if not store.check([f"here/{other}"])]
        raise TimeoutError(
            f"rank {', '.join(missing)} of the {size} in the group for weights did not come within"
            f" {limit.total_seconds():g} s (0 is the actor's rank 0, then the engines' processes in"
            " order)"
        ) from error


class BroadcastSender(Sender):
    """Only rank 0 packs, on its GPU."""

    def __init__(
        self, route: Route, rank: int, device: torch.device, listener: socket | None = None
    ) -> None:
        super().__init__(route, rank, device)
        if listener is not None:
            store = _store(route, listener.detach())  # which closes the socket
            self._group = BroadcastGroup(store, route, 0, device)

    def announce(self, bucket: Bucket) -> SentBucket:
        return SentBucket(bucket.manifest, {"size": bucket.data.numel()})

    def deliver(self, bucket: Bucket) -> None:
        self._group.broadcast(bucket.data)

    def end(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # return the memory of the buckets


class BroadcastReceiver:
    """A ``Receiver`` that joins the broadcasts of rank 0."""

    def __init__(self, route: Route, rank: int, device: torch.device) -> None:
        self._device = device
        self._group = BroadcastGroup(_store(route), route, rank, device)

    def open(self, sent: SentBucket) -> Tensor:
        data = torch.empty(sent.where["size"], dtype=torch.uint8, device=self._device)
        self._group.broadcast(data)
        return data
