"""Processes that receive weights by broadcast, from a sender in this process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from openrl.weights.buckets import Bucket, pack
from openrl.weights.transport import (
    Rendezvous,
    Route,
    Sender,
    SentBucket,
    make_receiver,
    make_sender,
)
from tests.patience import PATIENCE


def bucket_on(device: torch.device) -> Bucket:
    """A bucket of 16 MiB: more than fits into the buffers of a connection."""
    values = torch.arange(2**22, dtype=torch.float32, device=device)
    return pack([("a", values)], 1, lambda n: torch.zeros(n, dtype=torch.uint8, device=device))


def receive(connection: Connection, route: Route, rank: int, device: torch.device) -> None:
    """Opens a bucket whenever it is told to, and answers whether it is the right one, or why none
    came, once the device has nothing left to do."""
    connection.send("up")
    receiver, bucket = make_receiver(route, rank, device), bucket_on(device)
    sent = SentBucket(bucket.manifest, {"size": bucket.data.numel()})
    while connection.recv() == "open":
        try:
            connection.send(bool(torch.equal(receiver.open(sent), bucket.data)))
        except ConnectionAbortedError as error:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            connection.send(str(error))


@dataclass
class Receiving:
    """A receiver in a process of its own."""

    process: SpawnProcess
    end: Connection

    def open(self) -> None:
        self.end.send("open")

    def answer(self) -> Any:
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
    rendezvous = Rendezvous("127.0.0.1")
    meeting = {"address": rendezvous.address, "port": rendezvous.port, "timeout": timeout}
    route = Route("nccl", world_size=len(devices), **meeting)
    context, started = multiprocessing.get_context("spawn"), list[Receiving]()
    try:
        for rank, device in enumerate(devices[1:], 1):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=receive, args=(theirs, route, rank, device), daemon=True
            )
            process.start()
            started.append(Receiving(process, ours))
        # a process may take longer to start than the ranks wait for each other
        assert all(one.answer() == "up" for one in started)
        yield route, make_sender(route, 0, devices[0], rendezvous), started
    finally:
        for one in started:
            one.kill()
