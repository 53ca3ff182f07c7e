"""Copies complete checkpoints to another place while training continues."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from threading import Thread

import fsspec

from openrl.errors import UserError
from openrl.trainer.saving.integrity import MANIFEST

log = logging.getLogger(__name__)
COPY_TIMEOUT = 600.0  # seconds that a run waits for its copies


class Uploads:
    """Copies checkpoints to a directory or an fsspec URL. If a copy fails, that is logged, and the
    copy is retried together with the next checkpoint."""

    def __init__(self, target: str) -> None:
        """Raises UserError if no installed library can write to this kind of ``target``."""
        self.target = target if "://" in target else str(Path(target).expanduser().absolute())
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.target)
        except (ImportError, ValueError) as error:
            raise UserError(f"--ckpt_upload_dir {target}: {error}") from error
        self._waiting: list[Path] = []
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self, checkpoint: Path) -> None:
        """Start to copy this checkpoint, and those that failed before and still exist."""
        if gone := [old for old in self._waiting if not old.exists()]:
            log.warning("%s has no copy of %s, removed here", self.target, _names(gone))
        self._waiting = [*(old for old in self._waiting if old not in gone), checkpoint]
        self._idle = asyncio.Event()
        args = ([*self._waiting], self._idle, asyncio.get_running_loop())
        # a daemon, so that a copy that hangs does not keep the process alive
        Thread(target=self._copy_all, args=args, daemon=True).start()

    async def idle(self) -> None:
        """Wait for running copies, before a checkpoint is removed. Late ones count as failed."""
        try:
            await asyncio.wait_for(self._idle.wait(), COPY_TIMEOUT)
        except TimeoutError:
            names = _names(self._waiting)
            log.warning("%s: not copied within %g s: %s", self.target, COPY_TIMEOUT, names)
            self._idle.set()

    async def finish(self) -> None:
        """Wait for all copies, retry the failed ones once, and log what remains without a copy."""
        await self.idle()
        if self._waiting:
            self.begin(self._waiting.pop())
            await self.idle()
        if self._waiting:
            log.warning("%s has no copy of %s", self.target, _names(self._waiting))

    def _copy_all(
        self, checkpoints: list[Path], idle: asyncio.Event, loop: asyncio.AbstractEventLoop
    ) -> None:
        copied = []
        for checkpoint in checkpoints:
            try:
                self._copy(checkpoint)
                copied.append(checkpoint)
            except Exception as error:  # any library may be behind the URL; training continues
                log.warning("%s was not copied to %s: %s", checkpoint.name, self.target, error)
        with suppress(RuntimeError):  # the run has ended meanwhile
            loop.call_soon_threadsafe(self._ended, copied, idle)

    def _ended(self, copied: list[Path], idle: asyncio.Event) -> None:
        self._waiting = [checkpoint for checkpoint in self._waiting if checkpoint not in copied]
        idle.set()

    def _copy(self, checkpoint: Path) -> None:
        """Copy one checkpoint. The manifest comes last, since it marks the copy as complete."""
        files = sorted(checkpoint.rglob("*"), key=lambda path: path.name == MANIFEST)
        if not files:
            raise FileNotFoundError(f"{checkpoint} was removed meanwhile")
        for path in filter(Path.is_file, files):
            there = f"{self._root}/{path.relative_to(checkpoint.parent).as_posix()}"
            self._files.makedirs(there.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(path), there)


def _names(checkpoints: list[Path]) -> str:
    return ", ".join(checkpoint.name for checkpoint in checkpoints)
