"""What of a model leaves its device while other roles use it, and how it comes back bit for bit.

Memory moves by storage, not by tensor: DeepSpeed keeps many views of a few flat buffers
(parameters, masters, shards), and all of them stay valid while the storage below them is empty. So
this works for every ZeRO stage and optimizer. DeepSpeed's own ``offload_states`` does not: it has
nothing in stage 0 and wants its own Adam in stage 3."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from openrl.config.rollout import SleepState

# bytes; torch rounds pinned blocks up to powers of two, so large ones would waste host memory
PIECE = 256 * 2**20

Method = TypeVar("Method", bound=Callable[..., Any])


def needs(*parts: str) -> Callable[[Method], Method]:
    """A method of an engine (with a ``sleep``) that raises RuntimeError while one of these parts is
    asleep."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.sleeper.require(method.__name__, parts)
            return method(self, *args, **kwargs)

        return guarded  # type: ignore[return-value]

    return decorate


def parameter_tensors(model: nn.Module) -> list[Tensor]:
    """What --deepspeed_sleep_states calls param: parameters, in ZeRO 3 this rank's shards of them,
    and --zpg's copies."""
    names = ("data", "ds_tensor", "ds_secondary_tensor")
    found = (getattr(p, name, None) for p in model.parameters() for name in names)
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def gradient_tensors(parameters: Iterable[Tensor], optimizer: Any) -> list[Tensor]:
    """What gradients are written to, as far as it outlives a step: stage 1 keeps tensors, stage 3
    flat buffers."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    buckets = [bucket.buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
    flat = getattr(optimizer, "grad_partitions_flat_buffer", None)
    return [t for t in (*gradients, *buckets, flat) if isinstance(t, Tensor)]


@dataclass(frozen=True)
class Movable:
    """What moves with a part of a model."""

    tensors: list[Tensor]
    spared: list[Tensor] = field(default_factory=list)  # what shares memory with these stays
    dropped: bool = False  # the content is of no use to anybody


def movable(
    part: SleepState,
    model: nn.Module,
    inner: Optimizer | None = None,
    masters: Sequence[Tensor] = (),
    optimizer: Any = None,
) -> Movable:
    """Of a model that is trained: by ``inner``, which steps on ``masters``, below DeepSpeed's
    ``optimizer``."""
    parameters = parameter_tensors(model)
    if part == "param":
        return Movable(parameters)
    if part == "grad":
        return Movable(gradient_tensors([*model.parameters(), *masters], optimizer), dropped=True)
    states = inner.state.values() if inner is not None else ()
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return Movable([*masters, *tensors], spared=parameters)


class Kept(Protocol):
    """Where the bytes of a part are meanwhile, in order."""

    def put(self, data: Tensor) -> None: ...

    def restore(self, data: Tensor) -> None: ...


class InHostMemory:
    """Of a GPU: pinned host memory."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []

    def put(self, data: Tensor) -> None:
        for piece in data.split(PIECE):
            self._pieces.append(
                torch.empty(len(piece), dtype=torch.uint8, pin_memory=True).copy_(piece)
            )

    def restore(self, data: Tensor) -> None:
        for piece in data.split(PIECE):
            piece.copy_(self._pieces.pop(0))


class InFile:
    """Of a CPU: a file without a name under $TMPDIR, which ends with the process whatever
    happens."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="openrl_sleep_")  # noqa: SIM115
        self._read = 0  # bytes

    def put(self, data: Tensor) -> None:
        self._file.write(_buffer(data))

    def restore(self, data: Tensor) -> None:
        self._file.seek(self._read)
        count = self._file.readinto(_buffer(data))  # type: ignore[attr-defined]
        if count != len(data):
            raise OSError(f"a file of sleeping state ends {len(data) - count} bytes early")
        self._read += count


def _buffer(data: Tensor) -> ctypes.Array:
    """Bytes of a CPU as files take them. ``data.numpy()`` would do, but from then on torch refuses
    to free them."""
    return (ctypes.c_char * len(data)).from_address(data.data_ptr())


class Dropped:
    """Of gradients: nothing. Between two steps they have been used; their buffers come back as
    zeros."""

    def put(self, data: Tensor) -> None: ...

    def restore(self, data: Tensor) -> None:
        data.zero_()


@dataclass(frozen=True)
class _Asleep:
    storages: list[tuple[torch.UntypedStorage, int]]  # with their sizes in bytes
    kept: Kept


class Sleep:
    """The parts of one engine that are asleep. ``sleep`` empties their storages, ``wake`` fills
    them again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asleep: dict[str, _Asleep] = {}

    def require(self, what: str, parts: Iterable[str]) -> None:
        """Raises RuntimeError if one of ``parts`` is asleep: its tensors have no memory."""
        if asleep := [part for part in parts if part in self._asleep]:
            raise RuntimeError(
                f"{what} needs {' and '.join(asleep)} of this model, asleep now: wake it first"
            )

    def sleep(self, part: str, what: Movable) -> None:
        """Free the memory of a part on the device.

        What lies elsewhere (offloaded already) or in memory that is not torch's own (a mapped file)
        stays."""
        self.require("sleep", [part])
        spared = {t.untyped_storage().data_ptr() for t in what.spared}
        storages = [t.untyped_storage() for t in what.tensors if t.device.type == self._device.type]
        found = {storage.data_ptr(): storage for storage in storages}
        chosen = [
            s
            for address, s in found.items()
            if address not in spared and s.nbytes() and s.resizable()
        ]
        kept: Kept = (
            Dropped()
            if what.dropped
            else InHostMemory()
            if self._device.type == "cuda"
            else InFile()
        )
        for storage in chosen:
            kept.put(_bytes(storage))
        self._asleep[part] = _Asleep([(storage, storage.nbytes()) for storage in chosen], kept)
        for storage in chosen:
            storage.resize_(0)
        give_back(self._device)

    def wake(self, *parts: str) -> None:
        """Raises RuntimeError if a part is awake, or if there is no room for it; then it is still
        asleep."""
        for part in parts:
            if part not in self._asleep:
                raise RuntimeError(f"{part} of this model is awake already")
            slept = self._asleep[part]
            for storage, size in slept.storages:
                storage.resize_(size)
            for storage, _ in slept.storages:
                slept.kept.restore(_bytes(storage))
            del self._asleep[part]


def give_back(device: torch.device) -> None:
    """Freed memory goes from the allocator to the system. glibc keeps holes between what is in use
    unless it is asked."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage, (bytes,)."""
    nothing = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return nothing.set_(storage)  # type: ignore[call-overload]
