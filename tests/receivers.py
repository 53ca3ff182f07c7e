"""Processes that receive weights by any transport and hold them, in place of engines."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from openrl.weights.buckets import Bucket, checksum, pack
from openrl.weights.transport import (
    Route,
    Sender,
    SentBucket,
    make_receiver,
    make_sender,
    received_tensors,
)
from tests.patience import PATIENCE


class Holder:
    """Lives in the process."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.weights = device, dict[str, Tensor]()

    def connect(self, route: Route, rank: int) -> None:
        self.receiver = make_receiver(route, rank, self.device)

    def load(self, sent: SentBucket) -> None:
        """Returns or raises once the device has nothing left to do."""
        try:
            found = received_tensors(self.receiver, [sent])
            self.weights.update((name, tensor.clone()) for name, tensor in found)
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def checksums(self) -> dict[str, int]:
        return {name: checksum(tensor) for name, tensor in self.weights.items()}


def hold(connection: Connection, device: torch.device) -> None:
    holder = Holder(device)
    connection.send("up")
    while True:
        method, *args = connection.recv()
        try:
            connection.send(getattr(holder, method)(*args))
        except Exception as error:
            connection.send(error)


class Receiving:
    """A process with a ``Holder``."""

    def __init__(self, device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")
        self.end, theirs = context.Pipe()
        self.process = context.Process(target=hold, args=(theirs, device), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, method: str, *args: Any) -> None:
        self.end.send((method, *args))

    def answer(self) -> Any:
        """What the method returned or raised. Raises EOFError if the process has died."""
        assert self.end.poll(PATIENCE), "the receiver hangs"
        return self.end.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)


@contextmanager
def receivers(
    devices: Sequence[torch.device], timeout: int
) -> Iterator[tuple[Route, Sender, list[Receiving]]]:
    """A connected group: a sender on the first of ``devices``, a receiver on each other one.
    ``timeout``: seconds that they wait for each other."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    route = Route("nccl", port=port, world_size=len(devices), timeout=timeout)
    started = [Receiving(device) for device in devices[1:]]
    try:
        # a process may take longer to start than the ranks wait for each other
        assert all(one.answer() == "up" for one in started)
        for rank, one in enumerate(started, 1):
            one.ask("connect", route, rank)
        senders = [make_sender(route, 0, devices[0], listener)]
        assert all(one.answer() is None for one in started)
        yield route, senders.pop(), started  # the caller alone keeps the sender
    finally:
        for one in started:
            one.kill()


def bucket_on(device: torch.device) -> Bucket:
    """A bucket of 16 MiB: more than fits into the buffers of a connection."""
    values = torch.arange(2**22, dtype=torch.float32, device=device)
    return pack([("a", values)], 1, lambda n: torch.zeros(n, dtype=torch.uint8, device=device))


def announced(sender: Sender, bucket: Bucket) -> SentBucket:
    checksums = tuple(checksum(tensor) for _, tensor in bucket.tensors())
    return replace(sender.announce(bucket), checksums=checksums)
