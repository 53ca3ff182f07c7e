"""The transports that carry buckets from the trainer to the engines: their common protocol, and the
choice of one for a placement.

A *sender* lives in every rank of the trainer, a *receiver* in every process that holds an engine's
weights. A ``SentBucket`` travels between them: it says what is in the bucket and how to find its
bytes. It carries the bytes themselves only if engines run on other machines."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from socket import socket
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from openrl.errors import UserError, listed
from openrl.weights.buckets import Bucket, WeightManifest, checksum

TransportName = Literal["host", "nccl", "ipc"]

WORDS = {
    "host": "shared host memory",
    "nccl": "an NCCL broadcast from the actor's rank 0",
    "ipc": "CUDA IPC: an engine reads the memory of the actor's rank on its own GPU",
}
"""How logs and plans describe each transport."""

_ENDS = {
    "host": ("openrl.weights.host", "HostSender", "HostReceiver"),
    "nccl": ("openrl.weights.broadcast", "BroadcastSender", "BroadcastReceiver"),
    "ipc": ("openrl.weights.cuda_ipc", "IpcSender", "IpcReceiver"),
}
"""Transport -> the module with its ``Sender`` and ``Receiver``, and their names there."""


def choose_transport(
    backend: Literal["nccl", "gloo"] | None,
    trainer: Sequence[Hashable],
    engines: Sequence[Hashable],
) -> TransportName:
    """Choose the transport for a placement.

    Args:
        backend: --vllm_sync_backend; "gloo" means host memory for every placement.
        trainer: the GPU of each rank of the actor; empty on a CPU.
        engines: the GPU of each engine process; empty if some engine only reads host memory.

    CUDA IPC needs an actor rank on every engine's GPU, and a single reader of what that rank
    packs. NCCL accepts no GPU twice, and its group is the actor's rank 0 with all engines. Any
    other placement goes through host memory."""
    if backend == "gloo" or not trainer or not engines or len({*engines}) < len(engines):
        return "host"
    if {*engines} <= {*trainer}:
        return "ipc"
    return "host" if trainer[0] in engines else "nccl"


def fallback_warning(backend: str | None, transport: TransportName) -> str:
    """Return a warning if --vllm_sync_backend nccl was requested but cannot be used; else an empty
    string."""
    if backend != "nccl" or transport != "host":
        return ""
    return (
        "WARNING: --vllm_sync_backend nccl is not used: it needs the actor and vLLM's engines on"
        " GPUs, whole models to send, no replicas inside an engine, and engines that are all on the"
        " actor's GPUs or all apart from its first"
    )


@dataclass(frozen=True)
class SyncEndpoint:
    """The location of one worker of the actor or of one engine."""

    machine: str  # see ``machine_id``
    # UUIDs of the GPUs that hold its weights, by rank; empty if it exchanges them in host memory
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Route:
    """The settings that senders and receivers share for all syncs of a run."""

    transport: TransportName = "host"
    remote: bool = False  # announcements carry the bytes, for engines on other machines
    check: bool = False  # each tensor carries a checksum
    adapter: dict[str, Any] | None = None  # send only adapters, with this peft config
    keeps_tower: bool = False  # do not send the vision tower: engines have it from the checkpoint
    gpus: Sequence[str] = ()  # UUIDs of the engines' GPUs
    address: str = "127.0.0.1"  # where the ranks of a broadcast meet
    port: int = 0
    world_size: int = 1  # number of ranks in a broadcast
    timeout: int = 3600  # seconds that any of them waits for the others

    def message(self) -> dict[str, Any]:
        """Return the route in builtin types; ``Route(**message)`` restores it."""
        return asdict(self)


@dataclass(frozen=True)
class SentBucket:
    """The announcement of a bucket that is on its way."""

    manifest: WeightManifest
    where: dict[str, Any]  # what the receiver needs to find the bytes, in builtin types
    checksums: tuple[int, ...] = ()  # one per tensor; empty if not requested
    # (bytes,) uint8, for engines on other machines
    data: Tensor | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes, without padding."""
        tensors = zip(self.manifest.shapes, self.manifest.dtypes, strict=True)
        return sum(math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in tensors)

    def message(self) -> dict[str, Any]:
        """Return the announcement without ``data`` in builtin types, for channels that carry
        nothing else."""
        message = vars(self.manifest) | {"where": self.where, "checksums": self.checksums}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in message.items()}


def read_message(message: dict[str, Any]) -> SentBucket:
    """The inverse of ``SentBucket.message``."""
    shapes = tuple(tuple(shape) for shape in message["shapes"])
    manifest = WeightManifest(
        message["version"], tuple(message["names"]), tuple(message["dtypes"]), shapes
    )
    return SentBucket(manifest, message["where"], tuple(message["checksums"]))


class Sender(ABC):
    """The sending end in one rank of the trainer. A sync calls ``allocate``, ``announce`` and
    ``deliver`` for each bucket, then ``end``."""

    def __init__(
        self, route: Route, rank: int, device: torch.device, listener: socket | None = None
    ) -> None:
        self.device = device
        self.packs = rank == 0
        """Whether this rank packs buckets. A rank that does not only takes part in gathering the
        weights."""

    def allocate(self, size: int) -> Tensor:
        """Return memory for the next bucket, (size,) uint8."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    @abstractmethod
    def announce(self, bucket: Bucket) -> SentBucket:
        """Return what the engines need to know about a bucket."""

    def deliver(self, bucket: Bucket) -> None:  # noqa: B027 (most transports do nothing here)
        """Send the bytes, for transports where both ends must meet. Called once the announcement is
        on its way."""

    @abstractmethod
    def end(self) -> None:
        """End a sync, whole or broken off: free what only the sync needed."""


class Receiver(Protocol):
    """The receiving end in one process that holds an engine's weights."""

    def open(self, sent: SentBucket) -> Tensor:
        """Return the bytes of an announced bucket, (bytes,) uint8, valid until the end of the
        sync."""


def make_sender(
    route: Route, rank: int, device: torch.device, listener: socket | None = None
) -> Sender:
    """Build the sender of ``route``'s transport. ``rank`` is the rank within the actor. For a
    broadcast rank 0 gives the socket that listens where the members meet, at ``route.address``."""
    module, sender, _ = _ENDS[route.transport]
    return getattr(import_module(module), sender)(route, rank, device, listener)


def make_receiver(route: Route, rank: int, device: torch.device) -> Receiver:
    """Build the receiver of ``route``'s transport. ``rank`` is the rank in the broadcast group,
    where the trainer is 0."""
    module, _, receiver = _ENDS[route.transport]
    return getattr(import_module(module), receiver)(route, rank, device)


def corrupted_tensors(sent: SentBucket, bucket: Bucket) -> list[str]:
    """Return the names of tensors whose checksums differ from those sent. Empty, without a look at
    the data, if none were sent."""
    pairs = zip(bucket.tensors(), sent.checksums, strict=True) if sent.checksums else ()
    return [name for (name, tensor), expected in pairs if checksum(tensor) != expected]


def received_tensors(
    receiver: Receiver, received: Iterable[SentBucket]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors of the buckets, in memory that belongs to the sender. Raises
    UserError if a bucket is gone, or if a tensor arrived corrupted."""
    for sent in received:
        try:
            bucket = Bucket(sent.manifest, receiver.open(sent))
        except OSError as error:
            raise bucket_lost(str(error)) from error
        if changed := corrupted_tensors(sent, bucket):
            raise tensors_changed(changed)
        yield from bucket.tensors()


def bucket_lost(reason: str) -> UserError:
    return UserError(
        f"weight sync: a bucket is gone: {reason}",
        "look whether the actor's rank 0 has died; its log says why",
    )


def tensors_changed(names: Sequence[str]) -> UserError:
    return UserError(
        f"weight sync: {listed(names, 1)} arrived changed (--check_weight_sync)",
        "--vllm_sync_backend gloo, which goes through host memory; if that fails too, suspect"
        " the machine's memory",
    )
