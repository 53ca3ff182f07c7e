"""Transport by broadcast, for engines on GPUs of their own. Rank 0 of the trainer and every process
of every engine form a group, and each bucket is one broadcast.

The group is independent of the default process group on either side. On a CPU the same code runs
over gloo, for tests."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import count
from socket import socket

import torch
import torch.distributed as dist
from torch import Tensor

from openrl.weights import transport
from openrl.weights.buckets import Bucket
from openrl.weights.transport import Route, SentBucket

_ENDED = "ended"  # key in the store: why the group has ended
_POLL_S = 0.001  # seconds between two looks whether a broadcast is over
_POLLS = 100  # from one look into the store to the next
_ABORT_S = 30  # seconds that an abort may take
_WORD_S = 10  # seconds that the driver may take to reach the store


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


def end_group(route: Route, reason: str) -> None:
    """Make every member of ``route``'s group give up the broadcast that it waits in, and all later
    ones. For the driver, which is no member."""
    with suppress(RuntimeError):  # rank 0 is gone, which the others notice by themselves
        _store(replace(route, timeout=min(route.timeout, _WORD_S))).set(_ENDED, reason)


@contextmanager
def _no_watchdog() -> Iterator[None]:
    """Let torch make NCCL groups without a watchdog inside the with block. A watchdog ends the
    process after NCCL has noticed that a peer is gone, which it does between nodes."""
    name = "TORCH_NCCL_BLOCKING_WAIT"  # read when a group is made
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


class BroadcastGroup:
    """The process group of a broadcast. Rank 0 sends.

    If a member dies, NCCL lets the others wait forever. So a member that waits looks into the store
    from time to time, where whoever learns of a failure leaves a word."""

    def __init__(self, store: dist.Store, route: Route, rank: int, device: torch.device) -> None:
        """Join the group. Raises TimeoutError with the ranks that did not join within
        ``route.timeout`` seconds."""
        limit = timedelta(seconds=route.timeout)
        _wait_for_all(store, rank, route.world_size, limit)
        self._store, self._timeout, self._ended = store, route.timeout, ""
        scoped = dist.PrefixStore("weights", store)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=_ABORT_S)
            with _no_watchdog():
                self._group = dist.ProcessGroupNCCL(scoped, rank, route.world_size, options)
        else:
            self._group = dist.ProcessGroupGloo(scoped, rank, route.world_size, limit)

    def broadcast(self, data: Tensor) -> None:
        """Copy rank 0's ``data`` into that of the others. On a GPU this is ordered with the work of
        the current stream. Raises ConnectionAbortedError once the group has ended."""
        if not self._ended:
            self._ended = self._failure(data)
            if self._ended:
                with suppress(RuntimeError):  # the store died with rank 0
                    self._store.set(_ENDED, self._ended)
                self._group.abort()  # an aborted broadcast raises nothing, it merely is over
        if self._ended:
            raise ConnectionAbortedError(self._ended)

    def _failure(self, data: Tensor) -> str:
        """Broadcast ``data``. Returns why it failed, or an empty string."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        deadline, polls = time.monotonic() + self._timeout, count()
        try:
            work = self._group.broadcast([data], options)
            while not work.is_completed():
                if next(polls) % _POLLS == 0 and self._store.check([_ENDED]):
                    return self._store.get(_ENDED).decode()
                if time.monotonic() > deadline:
                    return f"a broadcast of weights took more than {self._timeout} s"
                time.sleep(_POLL_S)
            work.wait()  # raises what went wrong
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""


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


class Sender(transport.Sender):
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
        """Broadcast a bucket. Does nothing once the group has ended, which the engines report: this
        rank still has to gather the rest of the weights with the others."""
        with suppress(ConnectionAbortedError):
            self._group.broadcast(bucket.data)

    def end(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # return the memory of the buckets


class Receiver:
    """A ``transport.Receiver`` that joins the broadcasts of rank 0."""

    def __init__(self, route: Route, rank: int, device: torch.device) -> None:
        self._device = device
        self._group = BroadcastGroup(_store(route), route, rank, device)

    def open(self, sent: SentBucket) -> Tensor:
        data = torch.empty(sent.where["size"], dtype=torch.uint8, device=self._device)
        self._group.broadcast(data)
        return data
