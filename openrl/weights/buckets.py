"""Weights on the wire: named tensors flattened into a few large byte buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from openrl.types import WeightManifest

# bytes; every tensor starts at a multiple, so that it can be viewed in place in any dtype
_ALIGNMENT = 16
_WORDS = 2**22  # of eight bytes that a checksum looks at together

Named = list[tuple[str, Tensor]]
Allocate = Callable[[int], Tensor]
"""``allocate(size) -> (size,) uint8``: the memory that a bucket is packed into."""


@dataclass(frozen=True)
class Bucket:
    """One part of a sync: ``data`` holds the manifest's tensors one after another, as bytes."""

    manifest: WeightManifest
    data: Tensor  # (bytes,) uint8

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The named tensors, as views of ``data``. Raises ValueError if ``data`` is too short or
        too long."""
        end = 0
        manifest = self.manifest
        for name, dtype, shape in zip(
            manifest.names, manifest.dtypes, manifest.shapes, strict=True
        ):
            kind = getattr(torch, dtype)
            start = _aligned(end)
            end = start + torch.Size(shape).numel() * kind.itemsize
            if end > self.data.numel():
                break
            yield name, self.data[start:end].view(kind).view(shape)
        if end != self.data.numel():
            raise ValueError(
                f"bucket of {self.data.numel()} bytes does not hold what its manifest names"
            )


def cut(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Named]:
    """Cut a stream of named tensors into buckets, never splitting a tensor: a bucket is full with
    the tensor that makes it ``bucket_bytes`` long or longer, and a tensor of that length has one to
    itself.

    So there are at most ceil(bytes / bucket_bytes) of them, none but a single tensor longer than
    twice ``bucket_bytes``. Consumes lazily: besides a large tensor at most one bucket of gathered
    weights is held."""
    pending: Named = []
    size = 0
    for name, tensor in weights:
        tensor = tensor.detach()
        if tensor.nbytes >= bucket_bytes:
            yield [(name, tensor)]
            continue
        pending.append((name, tensor))
        size += tensor.nbytes
        if size >= bucket_bytes:
            yield pending
            pending, size = [], 0
    if pending:
        yield pending


def pack(named: Named, version: int, allocate: Allocate) -> Bucket:
    """The tensors of one bucket, copied side by side; each byte is written once."""
    starts, end = [], 0
    for _, tensor in named:
        starts.append(_aligned(end))
        end = starts[-1] + tensor.nbytes
    data = allocate(end)
    for start, (_, tensor) in zip(starts, named, strict=True):
        data[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    manifest = WeightManifest(
        version=version,
        names=tuple(name for name, _ in named),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in named),
        shapes=tuple(tuple(tensor.shape) for _, tensor in named),
    )
    return Bucket(manifest, data)


def checksum(tensor: Tensor) -> int:
    """A sum over the tensor's bytes as words of eight, each times an odd number that grows with its
    place, modulo 2^64.

    Integer arithmetic, so a CPU and a GPU agree; a flipped bit and two exchanged words change it.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    total = 0
    for start in range(0, len(words), _WORDS):
        part = words[start : start + _WORDS]
        total += int(
            (
                part * torch.arange(2 * start + 1, 2 * (start + len(part)), 2, device=part.device)
            ).sum()
        )
    tail = bytes(data[8 * len(words) :].tolist())
    return (total + int.from_bytes(tail, "little") * (2 * len(words) + 1)) % 2**64


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
