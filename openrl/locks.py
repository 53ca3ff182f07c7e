"""A directory that one process at a time writes to. Standard library only."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from openrl.errors import UserError

LOCK = ".run.lock"
BEAT_S = 20.0  # an owner touches its lock so often
DEAD_S = 120.0  # one of another machine is gone if it has not for so long


def owner_of(directory: Path) -> str | None:
    """The process that writes to ``directory``, in words; None if nobody does.

    The system lets go of a dead owner's lock. Where the file system does not tell machines of each
    other's locks, an owner elsewhere counts as alive as long as it touches the file."""
    path = directory / LOCK
    with suppress(OSError), open(path, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _words(file.read())
        return _elsewhere(file.read(), path)
    return None


@contextmanager
def locked(directory: Path, flag: str) -> Iterator[None]:
    """Within it this process owns ``directory``, which ``flag`` names. Raises UserError if another
    one does."""
    made = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    file = _open_locked(path)
    if file is None:
        raise refusal(flag, directory, owner_of(directory) or "another process")
    with file:
        file.seek(0)
        if (other := _elsewhere(file.read(), path)) is not None:
            raise refusal(flag, directory, other)
        file.seek(0)
        file.truncate()
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
        json.dump(owner, file)
        file.flush()
        over = threading.Event()
        threading.Thread(target=_beat, args=(path, over), daemon=True).start()
        try:
            yield
        finally:
            over.set()
            path.unlink(missing_ok=True)
            with suppress(OSError):  # not empty
                if made:
                    directory.rmdir()


def refusal(flag: str, directory: Path, owner: str) -> UserError:
    return UserError(
        f"--{flag}: {directory} belongs to a run that goes on: {owner}",
        f"another --{flag}, or end that run first",
    )


def _open_locked(path: Path):  # type: ignore[no-untyped-def]
    """The file, locked; None if somebody else has it. Its last owner may have removed it between
    our opening and our locking: then once more."""
    while True:
        file = open(path, "a+")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        with suppress(FileNotFoundError):
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
        file.close()


def _beat(path: Path, over: threading.Event) -> None:
    while not over.wait(BEAT_S):
        with suppress(OSError):
            os.utime(path)


def _elsewhere(text: str, path: Path) -> str | None:
    """The owner, if it is on another machine and was alive a moment ago."""
    with suppress(ValueError, KeyError, TypeError):
        if json.loads(text)["host"] != socket.gethostname():
            return _words(text) if time.time() - path.stat().st_mtime < DEAD_S else None
    return None


def _words(text: str) -> str:
    try:
        owner = json.loads(text)
        return f"process {owner['pid']} on {owner['host']}, since {owner['started']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
