"""How buckets get from the trainer to the engines: three ways behind one protocol, and which of
them a placement needs.

A *sender* lives in every rank of the trainer, a *receiver* in every process that holds an engine's
weights. Between them travels a ``SentBucket``: what is in the bucket and how to find its bytes, not
the bytes."""

from __future__ import annotations

import socket
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from openrl.errors import UserError
from openrl.types import WeightManifest
from openrl.weights.buckets import Bucket, checksum

TransportName = Literal["host", "nccl", "ipc"]

WORDS = {
    "host": "shared host memory",
    "nccl": "an NCCL broadcast from the actor's rank 0",
    "ipc": "CUDA IPC: an engine reads the memory of the actor's rank on its own GPU",
}
"""Each transport in the words of logs and plans."""

_HOMES = {
    "host": "openrl.weights.host",
    "nccl": "openrl.weights.broadcast",
    "ipc": "openrl.weights.cuda_ipc",
}
"""Transport -> the module with its ``Sender`` and ``Receiver``."""


def choose_transport(
    backend: Literal["nccl", "gloo"] | None,
    trainer: Sequence[Hashable],
    engines: Sequence[Hashable],
) -> TransportName:
    """The transport for a placement.

    Args:
        backend: --vllm_sync_backend; "gloo" is through host memory whatever the placement.
        trainer: the GPU of each rank of the actor; empty on a CPU.
        engines: the GPU of each process of each engine; empty if an engine reads host memory alone.

    CUDA IPC needs an actor's rank on every engine's GPU, and one reader of what it packed. NCCL
    takes no GPU twice, and its group is rank 0 with all engines. A placement between the two goes
    through host memory."""
    if backend == "gloo" or not trainer or not engines or len({*engines}) < len(engines):
        return "host"
    if {*engines} <= {*trainer}:
        return "ipc"
    return "host" if trainer[0] in engines else "nccl"


def replaced(backend: str | None, transport: TransportName) -> str:
    """A warning where --vllm_sync_backend nccl was asked for and cannot be; else empty."""
    if backend != "nccl" or transport != "host":
        return ""
    return (
        "WARNING: --vllm_sync_backend nccl is not used: it needs the actor and vLLM's engines on"
        " GPUs, whole models to send, no replicas inside an engine, and engines that are all on the"
        " actor's GPUs or all apart from its first"
    )


@dataclass(frozen=True)
class SyncEndpoint:
    """Where one worker of the actor, or one engine, is."""

    machine: str  # see ``machine_id``
    # UUIDs of the GPUs that its weights lie on, by rank; empty if they come from host memory
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Route:
    """What both ends of all syncs of a run agree on."""

    transport: TransportName = "host"
    remote: bool = False  # engines on other machines must be given the bytes
    check: bool = False  # each tensor carries a checksum
    adapter: dict[str, Any] | None = None  # adapters alone are sent, with this config of peft
    keeps_tower: bool = False  # the vision tower is not sent: engines have it from the checkpoint
    gpus: Sequence[str] = ()  # UUIDs of the engines' GPUs
    address: str = "127.0.0.1"  # where the ranks of a broadcast meet,
    port: int = 0
    world_size: int = 1  # how many they are,
    timeout: int = 3600  # and how long any of them waits for the others, in seconds

    def message(self) -> dict[str, Any]:
        """As builtin types: ``Route(**message)``."""
        return asdict(self)


@dataclass(frozen=True)
class SentBucket:
    """A bucket on its way."""

    manifest: WeightManifest
    where: dict[str, Any]  # what the receiver needs to find the bytes, as builtin types
    checksums: tuple[int, ...] = ()  # of each tensor; empty: not asked for
    # (bytes,) uint8, for engines on other machines
    data: Tensor | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Of the tensors."""
        kinds = (getattr(torch, dtype).itemsize for dtype in self.manifest.dtypes)
        return sum(
            torch.Size(s).numel() * size
            for s, size in zip(self.manifest.shapes, kinds, strict=True)
        )

    def message(self) -> dict[str, Any]:
        """As builtin types, for channels that carry nothing else; without ``data``."""
        manifest = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self.manifest).items()
        }
        return manifest | {"where": self.where, "checksums": list(self.checksums)}


def read_message(message: dict[str, Any]) -> SentBucket:
    """What ``SentBucket.message`` describes."""
    shapes = tuple(tuple(shape) for shape in message["shapes"])
    manifest = WeightManifest(
        message["version"], tuple(message["names"]), tuple(message["dtypes"]), shapes
    )
    return SentBucket(manifest, message["where"], tuple(message["checksums"]))


class Sender(Protocol):
    """One rank of the trainer. ``begin``, then ``announce`` and ``deliver`` for each bucket, then
    ``end``."""

    packs: bool
    """Whether this rank packs buckets; one that does not only takes part in gathering the
    weights."""

    def begin(self) -> None:
        """A sync starts; what is left of one that failed is void."""

    def allocate(self, size: int) -> Tensor:
        """Memory for the next bucket."""

    def announce(self, bucket: Bucket) -> SentBucket:
        """What the engines are told of a bucket."""

    def deliver(self, bucket: Bucket) -> None:
        """Called once the announcement is on its way, for transports where both ends meet."""

    def end(self) -> None:
        """Every engine has the weights."""


class Receiver(Protocol):
    """One process that holds weights of an engine."""

    def open(self, sent: SentBucket) -> Tensor:
        """The bytes of an announced bucket, (bytes,) uint8, to be read until the end of the
        sync."""


class Rendezvous:
    """Where the ranks of a broadcast find each other: a port of the actor's rank 0, bound to its
    address alone."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0), backlog=128)
        self.address, self.port = address, self._listener.getsockname()[1]

    def take(self) -> int:
        """The descriptor of the listening socket; who takes it closes it."""
        return self._listener.detach()


def make_sender(
    route: Route, rank: int, device: torch.device, rendezvous: Rendezvous | None = None
) -> Sender:
    """``rank`` is that among the ranks of the actor, ``rendezvous`` the one that ``route`` leads
    to, on rank 0."""
    return import_module(_HOMES[route.transport]).Sender(route, rank, device, rendezvous)


def make_receiver(route: Route, rank: int, device: torch.device) -> Receiver:
    """``rank`` is that in the group of a broadcast, where the trainer is 0."""
    return import_module(_HOMES[route.transport]).Receiver(route, rank, device)


def changed_on_the_way(sent: SentBucket, bucket: Bucket) -> list[str]:
    """Names of the tensors that are not what was sent; nothing is looked at unless checksums were
    sent."""
    pairs = zip(bucket.tensors(), sent.checksums, strict=True) if sent.checksums else ()
    return [name for (name, tensor), expected in pairs if checksum(tensor) != expected]


def opened(
    receiver: Receiver, received: Iterable[SentBucket]
) -> Iterator[tuple[SentBucket, Bucket]]:
    """The buckets behind announcements. Raises UserError if the memory of one is gone."""
    for sent in received:
        try:
            yield sent, Bucket(sent.manifest, receiver.open(sent))
        except OSError as error:
            refuse_incomplete(lost=[str(error)])


def refuse_incomplete(lost: Sequence[str] = (), changed: Sequence[str] = ()) -> None:
    """Raises UserError if a bucket could not be opened, with the reasons ``lost``, or tensors named
    by ``changed`` arrived other than they were sent."""
    if lost:
        raise UserError(
            f"weight sync: the memory of a bucket is gone: {lost[0]}",
            "look whether the actor's rank 0 has died; its log says why",
        )
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise UserError(
            f"weight sync: {changed[0]}{more} arrived changed (--check_weight_sync)",
            "--vllm_sync_backend gloo, which goes through host memory; if that fails too, suspect"
            " the machine's memory",
        )
