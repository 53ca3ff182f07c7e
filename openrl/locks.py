"""Locks on directories, so that only one process at a time writes to each. Standard library
only."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from openrl.errors import UserError

LOCK = ".run.lock"
BEAT_S = 20.0  # seconds between two touches of the lock file by its owner
DEAD_S = 120.0  # an owner on another machine counts as dead after this long without a touch
# of Lustre that is mounted without flock, or NFS without a lock server
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def owner_of(directory: Path) -> str | None:
    """Describe the process that owns ``directory``; None if nobody does.

    The operating system releases the lock of a dead process. Some file systems do not share locks
    between machines, so an owner on another machine counts as alive while it touches the file. If
    there are no locks at all, an owner on this machine counts as alive while its process is."""
    path = directory / LOCK
    with suppress(OSError), open(path, "r+") as file:
        try:
            locks = lock(file)
        except BlockingIOError:
            return _words(file.read())
        return _owner(file.read(), path, locks)
    return None


@contextmanager
def locked(directory: Path, flag: str) -> Iterator[None]:
    """Own ``directory``, the value of ``flag``, inside the with block. Raises UserError if another
    process owns it."""
    made = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    file, locks = _open_locked(path)
    if file is None:
        raise refusal(flag, directory, owner_of(directory) or "another process")
    with file:
        file.seek(0)
        if (other := _owner(file.read(), path, locks)) is not None:
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
            with suppress(OSError):  # the directory is not empty
                if made:
                    directory.rmdir()


def refusal(flag: str, directory: Path, owner: str) -> UserError:
    return UserError(
        f"{directory} is in use by another run: {owner}",
        f"another --{flag}, or stop that run first",
        flags=(flag,),
    )


def _open_locked(path: Path):  # type: ignore[no-untyped-def]
    """Open and lock the file. Returns it, or None if another process holds the lock, and whether
    the file system has locks. Tries again if the previous owner deleted the file between the open
    and the lock."""
    while True:
        file = open(path, "a+")  # noqa: SIM115
        try:
            locks = lock(file)
        except BlockingIOError:
            file.close()
            return None, True
        with suppress(FileNotFoundError):
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file, locks
        file.close()


def lock(file: IO[Any]) -> bool:
    """Lock the file and return True; False if its file system has no locks. Raises BlockingIOError
    if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def _beat(path: Path, over: threading.Event) -> None:
    while not over.wait(BEAT_S):
        with suppress(OSError):
            os.utime(path)


def _owner(text: str, path: Path, locks: bool) -> str | None:
    """Describe the owner if it lives, as far as the file can tell; None if not. If the file system
    has ``locks``, no process of this machine holds the one of this file."""
    with suppress(ValueError, KeyError, TypeError):
        owner = json.loads(text)
        if owner["host"] != socket.gethostname():
            lives = time.time() - path.stat().st_mtime < DEAD_S
        else:
            pid = owner["pid"]
            lives = not locks and pid != os.getpid() and Path(f"/proc/{pid}").exists()
        return _words(text) if lives else None
    return None


def _words(text: str) -> str:
    try:
        owner = json.loads(text)
        return f"process {owner['pid']} on {owner['host']}, since {owner['started']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
