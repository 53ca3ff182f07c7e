"""Buckets, the wire format of weights: named tensors flattened into a few large byte buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# bytes; every tensor starts at a multiple of it, so that it can be viewed in place in any dtype
_ALIGNMENT = 16
_WORDS = 2**22  # eight-byte words that a checksum processes at a time, to bound its memory

Named = list[tuple[str, Tensor]]
Allocate = Callable[[int], Tensor]
"""``allocate(size) -> (size,) uint8``: returns the memory that a bucket is packed into."""


@dataclass(frozen=True)
class WeightManifest:
    """The weights that a sync carries, under Hugging Face checkpoint names, in sending order."""

    version: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]  # "float32", "bfloat16", ...
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Bucket:
    """One part of a weight sync. ``data`` holds the bytes of the manifest's tensors, one after
    another."""

    manifest: WeightManifest
    data: Tensor  # (bytes,) uint8

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors as views of ``data``. Raises ValueError if ``data`` is too short
        or too long."""
        end, about = 0, self.manifest
        for name, dtype, shape in zip(about.names, about.dtypes, about.shapes, strict=True):
            kind = getattr(torch, dtype)
            start = _aligned(end)
            end = start + torch.Size(shape).numel() * kind.itemsize
            if end > self.data.numel():
                break
            yield name, self.data[start:end].view(kind).view(shape)
        if end != self.data.numel():
            size = self.data.numel()
            raise ValueError(f"bucket of {size} bytes does not hold what its manifest names")


def split_into_buckets(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Named]:
    """Cut a stream of named tensors into buckets without splitting any tensor. A bucket is full as
    soon as it holds ``bucket_bytes`` or more; a tensor of at least that size gets its own bucket.

    So there are at most ceil(bytes / bucket_bytes) buckets, and only a single large tensor can
    make one longer than twice ``bucket_bytes``. The stream is consumed lazily: at most one bucket
    of gathered weights, plus one large tensor, is held at a time."""
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
    """Copy the tensors of one bucket side by side into memory from ``allocate``. Each byte is
    written once."""
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
    """Return a checksum of the tensor's bytes: the sum of its 64-bit words modulo 2^64, where word
    i is multiplied by 2i + 1.

    The arithmetic is on integers, so a CPU and a GPU agree. A flipped bit changes the sum, and so
    does swapping two words.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    total = 0
    for start in range(0, len(words), _WORDS):
        part = words[start : start + _WORDS]
        end = start + len(part)
        factors = torch.arange(2 * start + 1, 2 * end, 2, device=part.device)
        total += int((part * factors).sum())
    tail = bytes(data[8 * len(words) :].tolist())
    return (total + int.from_bytes(tail, "little") * (2 * len(words) + 1)) % 2**64


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
