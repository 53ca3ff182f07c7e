"""Checks that a checkpoint on disk is what was written, by sizes and checksums of its files."""

from __future__ import annotations

import json
import stat
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
READERS = 8  # threads; they run in parallel since zlib releases the GIL
PIECE = 1 << 24  # bytes read at a time


def fingerprints(directory: Path) -> dict[str, list[int]]:
    """Return [size in bytes, CRC-32] of each file below ``directory``, by relative path."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    with ThreadPoolExecutor(READERS) as pool:
        checksums = pool.map(checksum, paths)
        return {
            str(path.relative_to(directory)): [path.stat().st_size, found]
            for path, found in zip(paths, checksums, strict=True)
        }


def checksum(path: Path) -> int:
    found = 0
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            found = zlib.crc32(piece, found)
    return found


def add_checksum(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest with a checksum of itself added."""
    return manifest | {"seal": _seal(manifest)}


def _seal(manifest: dict[str, Any]) -> int:
    rest = {name: value for name, value in manifest.items() if name != "seal"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def read_manifest(directory: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
    return manifest


def find_damage(directory: Path, deep: bool = True) -> str | None:
    """Describe what is wrong with a checkpoint, naming the file; None if it is undamaged. Without
    ``deep`` only the manifest and the sizes of files are checked, not their contents."""
    try:
        manifest = read_manifest(directory)
        files = manifest["files"]
    except FileNotFoundError:
        return f"{MANIFEST} is missing: the checkpoint was never complete"
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"
    if manifest.get("seal") != _seal(manifest):
        return f"{MANIFEST} is not what was written"
    for name, (size, _) in files.items():
        if wrong := _wrong_size(directory / name, size):
            return f"{name} {wrong}"
    if not deep:
        return None
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda name: _wrong_content(directory / name, files[name][1]), files)
        named = zip(files, found, strict=True)
        return next((f"{name} {wrong}" for name, wrong in named if wrong), None)


def _wrong_size(path: Path, expected: int) -> str | None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not stat.S_ISREG(found.st_mode):
        return "is no file"
    if found.st_size != expected:
        return f"has {found.st_size} bytes instead of {expected}"
    return None


def _wrong_content(path: Path, expected: int) -> str | None:
    try:
        actual = checksum(path)
    except OSError as error:  # of a bad disk, or of a file that belongs to somebody else
        return f"cannot be read ({error.strerror})"
    return None if actual == expected else "is not what was written: its checksum differs"
