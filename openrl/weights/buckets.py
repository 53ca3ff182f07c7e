"""Weights on the wire: named tensors flattened into a few large byte buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from openrl.types import WeightManifest

_ALIGNMENT = 16  # bytes; every tensor starts at a multiple, so that it can be viewed in place in any dtype


@dataclass(frozen=True)
class Bucket:
    """One part of a sync: ``data`` holds the manifest's tensors one after another, as bytes."""

    manifest: WeightManifest
    data: Tensor  # (bytes,) uint8, on the CPU

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The named tensors, as views of ``data``. Raises ValueError if ``data`` is too short or too long."""
        end = 0
        manifest = self.manifest
        for name, dtype, shape in zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True):
            kind = getattr(torch, dtype)
            start = _aligned(end)
            end = start + torch.Size(shape).numel() * kind.itemsize
            if end > self.data.numel():
                break
            yield name, self.data[start:end].view(kind).view(shape)
        if end != self.data.numel():
            raise ValueError(f"bucket of {self.data.numel()} bytes does not hold what its manifest names")


def fill_buckets(weights: Iterable[tuple[str, Tensor]], version: int, bucket_bytes: int) -> Iterator[Bucket]:
    """Cut a stream of named tensors into buckets of about ``bucket_bytes``, never splitting a tensor.

    Consumes lazily, so that at most one bucket of gathered weights exists at a time.
    """
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if pending and size + tensor.nbytes > bucket_bytes:
            yield _flatten(pending, version)
            pending, size = [], 0
        pending.append((name, tensor.detach()))
        size = _aligned(size) + tensor.nbytes
    if pending:
        yield _flatten(pending, version)


def _flatten(named: list[tuple[str, Tensor]], version: int) -> Bucket:
    starts, end = [], 0
    for _, tensor in named:
        starts.append(_aligned(end))
        end = starts[-1] + tensor.nbytes
    data = torch.zeros(end, dtype=torch.uint8)
    for start, (_, tensor) in zip(starts, named, strict=True):
        data[start : start + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
    manifest = WeightManifest(
        version=version,
        names=tuple(name for name, _ in named),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in named),
        shapes=tuple(tuple(tensor.shape) for _, tensor in named),
    )
    return Bucket(manifest, data)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
