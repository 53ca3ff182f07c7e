"""Buckets handed from one process to another of the same machine, as files in memory."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openrl.types import WeightManifest
from openrl.weights.buckets import Bucket

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class BucketFile:
    """Where a bucket lies: its bytes in ``path``, what they are in ``manifest``."""

    path: str
    manifest: WeightManifest

    def message(self) -> dict[str, Any]:
        """As builtin types, for channels that carry nothing else."""
        manifest = self.manifest
        fields = {"names": manifest.names, "dtypes": manifest.dtypes, "shapes": manifest.shapes}
        return {"path": self.path, "version": manifest.version} | {k: list(v) for k, v in fields.items()}


def open_bucket(message: dict[str, Any]) -> Bucket:
    """The bucket that ``BucketFile.message`` describes, its data mapped from the file, not copied."""
    manifest = WeightManifest(
        version=message["version"],
        names=tuple(message["names"]),
        dtypes=tuple(message["dtypes"]),
        shapes=tuple(tuple(shape) for shape in message["shapes"]),
    )
    size = Path(message["path"]).stat().st_size
    # shared=False maps privately: an engine that changes a tensor in place does not write into the file
    return Bucket(manifest, torch.from_file(message["path"], shared=False, size=size, dtype=torch.uint8))


class BucketFiles:
    """The buckets of one sync on their way; readable by this user only, gone after ``clear``."""

    def __init__(self) -> None:
        self._folders: dict[Path, tempfile.TemporaryDirectory[str]] = {}
        self._count = 0

    def put(self, bucket: Bucket) -> BucketFile:
        """Write the bucket. Raises OSError if there is no room for it, neither in memory nor on disk."""
        path = self._folder(bucket.data.numel()) / f"{self._count}.bucket"
        self._count += 1
        bucket.data.numpy().tofile(path)
        return BucketFile(str(path), bucket.manifest)

    def clear(self) -> None:
        """Remove every file. May be called at any time, also twice."""
        for folder in self._folders.values():
            folder.cleanup()
        self._folders.clear()

    def _folder(self, size: int) -> Path:
        """In memory if there is some with room to spare (containers often have 64 MiB), else where temporary files go."""
        memory = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > 2 * size
        parent = _SHARED_MEMORY if memory else Path(tempfile.gettempdir())
        if parent not in self._folders:
            self._folders[parent] = tempfile.TemporaryDirectory(prefix="openrl-weights-", dir=parent)
        return Path(self._folders[parent].name)
