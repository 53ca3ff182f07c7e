"""Writing files so that a reader, or a run that dies, never meets half of one. Standard library
only."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write beside ``path``, force it to disk, rename over it. Text is UTF-8. A device or a pipe,
    which would be gone then, is written to."""
    encoded = data.encode() if isinstance(data, str) else data
    if path.exists() and not path.is_file():
        path.write_bytes(encoded)
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "wb") as file:
            file.write(encoded)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
