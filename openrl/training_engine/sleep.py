"""Moves parts of a model off the device while other roles use it, and brings them back bit for bit.

Memory moves by storage, not by tensor. DeepSpeed keeps many views of a few flat buffers
(parameters, masters, shards), and all views stay valid while the storage below them is empty. So
this works for every ZeRO stage and optimizer. DeepSpeed's own ``offload_states`` does not: it has
no effect in stage 0 and requires DeepSpeed's own Adam in stage 3."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from openrl.config.groups.placement import ModelPart

# bytes; torch rounds pinned blocks up to powers of two, so larger ones would waste host memory
PIECE = 256 * 2**20
ALL_ARENAS_PURGED = b"arena.4096.purge"  # jemalloc's word; 4096 is its MALLCTL_ARENAS_ALL

Method = TypeVar("Method", bound=Callable[..., Any])


def needs(*parts: str) -> Callable[[Method], Method]:
    """Return a decorator for methods of an engine that has a ``sleeper``. The method raises
    RuntimeError while one of these parts is asleep."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.sleeper.require(method.__name__, parts)
            return method(self, *args, **kwargs)

        return guarded  # type: ignore[return-value]

    return decorate


def parameter_tensors(model: nn.Module) -> list[Tensor]:
    """Return what --deepspeed_sleep_states calls "param": the parameters, with ZeRO 3 this rank's
    shards of them, and --zpg's secondary copies."""
    names = ("data", "ds_tensor", "ds_secondary_tensor")
    found = (getattr(p, name, None) for p in model.parameters() for name in names)
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def gradient_tensors(parameters: Iterable[Tensor], optimizer: Any) -> list[Tensor]:
    """Return the gradients that outlive a step: tensors in stage 1, flat buffers in stage 3."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    buckets = [bucket.buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
    flat = getattr(optimizer, "grad_partitions_flat_buffer", None)
    return [t for t in (*gradients, *buckets, flat) if isinstance(t, Tensor)]


@dataclass(frozen=True)
class Movable:
    """The tensors that move when a part of a model falls asleep."""

    tensors: list[Tensor]
    spared: list[Tensor] = field(default_factory=list)  # memory shared with these stays
    dropped: bool = False  # nobody needs the content any more; it comes back as zeros


def movable(
    part: ModelPart,
    model: nn.Module,
    inner: Optimizer | None = None,
    masters: Sequence[Tensor] = (),
    optimizer: Any = None,
) -> Movable:
    """Return what moves with ``part`` of a model. If the model is trained, ``inner`` is the
    optimizer that steps on ``masters`` below DeepSpeed's ``optimizer``."""
    parameters = parameter_tensors(model)
    if part == "param":
        return Movable(parameters)
    if part == "grad":
        return Movable(gradient_tensors([*model.parameters(), *masters], optimizer), dropped=True)
    states = inner.state.values() if inner is not None else ()
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return Movable([*masters, *tensors], spared=parameters)


class InHostMemory:
    """Keeps a GPU's bytes in pinned host memory. ``restore`` returns them in order of ``put``."""

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
    """Does the same for a CPU in an unnamed file under $TMPDIR, which vanishes with the process
    however it ends."""

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
    """Return the bytes of a CPU tensor as a buffer for file I/O. ``data.numpy()`` would work too,
    but torch then refuses to resize the storage."""
    return (ctypes.c_char * len(data)).from_address(data.data_ptr())


@dataclass(frozen=True)
class _Asleep:
    storages: list[tuple[torch.UntypedStorage, int]]  # each with its size in bytes
    kept: InHostMemory | InFile | None  # None: the content was dropped


class Sleep:
    """The sleeping parts of one engine: ``sleep`` empties their storages, ``wake`` fills them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asleep: dict[str, _Asleep] = {}

    def require(self, what: str, parts: Iterable[str]) -> None:
        """Raise RuntimeError if one of ``parts`` is asleep, since its tensors have no memory."""
        if asleep := [part for part in parts if part in self._asleep]:
            raise RuntimeError(
                f"{what} needs {' and '.join(asleep)} of this model, asleep now: wake it first"
            )

    def sleep(self, part: str, what: Movable) -> None:
        """Free the memory of a part on the device. Tensors that are elsewhere (already offloaded)
        or in memory that torch does not own (a mapped file) stay."""
        self.require("sleep", [part])
        spared = {t.untyped_storage().data_ptr() for t in what.spared}
        storages = [t.untyped_storage() for t in what.tensors if t.device.type == self._device.type]
        found = {storage.data_ptr(): storage for storage in storages}
        moving = [s for address, s in found.items() if address not in spared]
        chosen = [s for s in moving if s.nbytes() and s.resizable()]
        kept = None
        if not what.dropped:
            kept = InHostMemory() if self._device.type == "cuda" else InFile()
            for storage in chosen:
                kept.put(_bytes(storage))
        self._asleep[part] = _Asleep([(storage, storage.nbytes()) for storage in chosen], kept)
        for storage in chosen:
            storage.resize_(0)
        empty_cache(self._device)

    def wake(self, *parts: str) -> None:
        """Restore parts. Raises RuntimeError if a part is already awake, or if there is no memory
        for it; in the latter case it stays asleep."""
        for part in parts:
            if part not in self._asleep:
                raise RuntimeError(f"{part} of this model is awake already")
            slept = self._asleep[part]
            for storage, size in slept.storages:
                storage.resize_(size)
            for storage, _ in slept.storages:
                if slept.kept is None:
                    _bytes(storage).zero_()
                else:
                    slept.kept.restore(_bytes(storage))
            del self._asleep[part]


def release(tensors: Iterable[Tensor]) -> None:
    """Free the memory of tensors that nobody needs any more, whoever refers to them. Memory that
    torch does not own (a mapped file) stays."""
    for storage in [tensor.untyped_storage() for tensor in tensors]:
        if storage.nbytes() and storage.resizable():
            storage.resize_(0)


def empty_cache(device: torch.device) -> None:
    """Give the allocator's free memory back to the system. Unless asked, jemalloc keeps all of it
    (``worker_env``), and glibc what lies between blocks in use."""
    process = ctypes.CDLL(None)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif control := getattr(process, "mallctl", None):
        control(ALL_ARENAS_PURGED, None, None, None, ctypes.c_size_t(0))
    elif trim := getattr(process, "malloc_trim", None):
        trim(0)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return all bytes of a storage as a tensor, (bytes,)."""
    nothing = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return nothing.set_(storage)  # type: ignore[call-overload]
