"""Atomic file writes, so that no reader ever sees half a file, even if the writing run dies; and
reading files that a user names. Standard library only."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OPENED = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # <(...) is such a name
LFS_POINTER = b"version https://git-lfs"


def as_utf8(text: str) -> bytes:
    """Encode a text. A half of a surrogate pair, which UTF-8 lacks, becomes an escape such as
    \\udcff, as in JSON."""
    return text.encode(errors="backslashreplace")


def writable(text: str) -> str:
    """Return the text as files and trackers can hold it, with halves of surrogate pairs escaped."""
    return text if text.isascii() else as_utf8(text).decode()


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write a temporary file next to ``path``, fsync it and rename it over ``path``. Text is
    encoded by ``as_utf8``. A device or a pipe is written directly, since a rename would replace
    it."""
    encoded = as_utf8(data) if isinstance(data, str) else data
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
    except OSError as error:
        if error.strerror:  # that of a full disk names no file
            error.filename = error.filename or str(path)
        raise
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def model_written_aside(directory: Path) -> Iterator[Path]:
    """Yield a directory for the files of a model. After the with block each of them is renamed into
    ``directory``, config.json last, and weights of an earlier model go. If the block fails,
    ``directory`` keeps what it had."""
    aside = directory / ".model.partial"
    shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed
    aside.mkdir(parents=True)
    try:
        yield aside
        for earlier in directory.glob("model*.safetensors*"):
            if not (aside / earlier.name).exists():
                earlier.unlink()
        for written in sorted(aside.iterdir(), key=lambda path: path.name == "config.json"):
            place = directory / written.name
            if place.is_dir():
                shutil.rmtree(place)
            os.replace(written, place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def expanded(name: str) -> Path:
    """Return a path with ~ replaced, except in the name of an unknown user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def file_and_name(given: str) -> tuple[str, str | None]:
    """Split PATH.py[:NAME] in two.

    >>> file_and_name("~/.pyenv/agents.py:Guess")
    ('~/.pyenv/agents.py', 'Guess')
    """
    path, _, name = given.rpartition(".py:")
    return (f"{path}.py", name or None) if path else (given, None)


def read_text(name: str) -> str:
    """Return the text of a file. Raises UnicodeDecodeError, and OSError also for a directory, and
    for a device or a pipe, which might never end, unless the shell has opened it for us."""
    path = expanded(name)
    if not name:
        raise OSError(errno.ENOENT, "no file is named", name)
    if path.exists() and not path.is_file() and not (path.is_fifo() and name.startswith(OPENED)):
        raise OSError(errno.EINVAL, "not a regular file", name)
    return path.read_text(encoding="utf-8")


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is what Git LFS puts in its place before the content is fetched."""
    with open(path, "rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER
