"""A process that receives weights by any transport and holds them, in place of an engine."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from openrl.weights.transport import Route, SentBucket, make_receiver, received_tensors
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
        self.end, child_end = context.Pipe()
        self.process = context.Process(target=hold, args=(child_end, device), daemon=True)
        self.process.start()
        child_end.close()

    def ask(self, method: str, *args: Any) -> None:
        self.end.send((method, *args))

    def answer(self) -> Any:
        """What the method returned or raised. Raises EOFError if the process has died."""
        assert self.end.poll(PATIENCE), "the receiver hangs"
        return self.end.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)
