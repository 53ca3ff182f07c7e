"""Disk space: checks before something is written, and recognises the errors of a full disk."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from openrl.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# a disk that takes no more writes, or is gone: training need not end with it
BROKEN = (errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOTCONN, errno.EACCES)
WORDS = (  # messages of libraries that do not write through Python
    "no space left on device",
    "disk quota exceeded",
    "file too large",
    "pytorchstreamwriter failed",
    "inline_container",  # torch.save, whatever went wrong with its file
    "os error 28",
    "os error 27",
)
UNITS = ((2**10, "KiB"), (2**20, "MiB"), (2**30, "GiB"))


class DiskFull(UserError):
    """Something could not be written because the disk is full, would be, or takes no writes."""


def disk_is_full(error: BaseException) -> bool:
    """Return whether ``error``, or one of its causes, says that the disk is full or takes no
    writes."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        e = waiting.pop()
        if e is None or id(e) in seen:
            continue
        if isinstance(e, DiskFull) or (isinstance(e, OSError) and e.errno in FULL + BROKEN):
            return True
        if any(words in str(e).lower() for words in WORDS):
            return True
        seen.add(id(e))
        waiting += [e.__cause__, e.__context__]
    return False


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system that holds ``path``, or will once it exists."""
    path = path.absolute()
    nearest = next(p for p in (path, *path.parents) if p.exists())
    return shutil.disk_usage(nearest).free


def require_room(path: Path, needed: int, what: str) -> None:
    """Raise DiskFull unless ``path`` has ``needed`` bytes free. ``what`` names what needs them."""
    if (free := free_bytes(path)) < needed:
        raise DiskFull(
            f"{what} needs about {format_bytes(needed)} at {path}, where {format_bytes(free)} is"
            " free"
        )


@contextmanager
def model_has_room(directory: Path) -> Iterator[None]:
    """Turn the error of a full disk into DiskFull while a model is written to ``directory``."""
    try:
        yield
    except Exception as error:
        if not disk_is_full(error) or isinstance(error, DiskFull):
            raise
        where = str(directory)
        with suppress(OSError):  # a disk that is gone does not say what is free
            where += f", where {format_bytes(free_bytes(directory))} is free"
        message = f"the model could not be written to {where}: {first_line(error)}"
        raise DiskFull(
            message, "make room, or give another --save_path; then resume from the last checkpoint"
        ) from error


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def format_bytes(count: float) -> str:
    """Format a number of bytes for people, e.g. "1.5 GiB"."""
    if count < 1024:
        return f"{count:.0f} B"
    unit, name = next((u for u in UNITS if count < 1024 * u[0]), UNITS[-1])
    return f"{count / unit:.1f} {name}"
