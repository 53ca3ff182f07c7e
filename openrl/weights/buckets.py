"""Weights on the wire: named tensors flattened into a few large byte buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from openrl.types import WeightManifest


@dataclass(frozen=True)
class Bucket:
    """One part of a sync: ``data`` holds the manifest's tensors one after another, as bytes."""

    manifest: WeightManifest
    data: Tensor  # (bytes,) uint8, on the CPU

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The named tensors, as views of ``data``."""
        offset = 0
        for name, dtype, shape in zip(self.manifest.names, self.manifest.dtypes, self.manifest.shapes, strict=True):
            kind = getattr(torch, dtype)
            size = int(torch.Size(shape).numel()) * kind.itemsize
            yield name, self.data[offset : offset + size].clone().view(kind).view(shape)
            offset += size


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
        size += tensor.nbytes
    if pending:
        yield _flatten(pending, version)


def _flatten(named: list[tuple[str, Tensor]], version: int) -> Bucket:
    manifest = WeightManifest(
        version=version,
        names=tuple(n for n, _ in named),
        dtypes=tuple(str(t.dtype).removeprefix("torch.") for _, t in named),
        shapes=tuple(tuple(t.shape) for _, t in named),
    )
    return Bucket(manifest, torch.cat([t.contiguous().view(-1).view(torch.uint8).cpu() for _, t in named]))
