"""Copies of complete checkpoints in another place, made beside the training."""

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
    """Copies to a directory or an fsspec URL. A checkpoint that could not be copied is told, and
    tried again with the next one."""

    def __init__(self, target: str) -> None:
        """Raises UserError if ``target`` is of a kind that nothing here can write to."""
        self.target = target if "://" in target else str(Path(target).expanduser().absolute())
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.target)
        except (ImportError, ValueError) as error:
            raise UserError(f"--ckpt_upload_dir {target}: {error}") from error
        self._waiting: list[Path] = []
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self, checkpoint: Path) -> None:
        """Copy this checkpoint, and those that failed before."""
        self._waiting.append(checkpoint)
        self._idle = asyncio.Event()
        args = ([*self._waiting], self._idle, asyncio.get_running_loop())
        # a copy that hangs does not keep the process from ending
        Thread(target=self._copy_all, args=args, daemon=True).start()

    async def idle(self) -> None:
        """Wait for the copies under way, until which no checkpoint may be removed; after
        COPY_TIMEOUT they have failed."""
        try:
            await asyncio.wait_for(self._idle.wait(), COPY_TIMEOUT)
        except TimeoutError:
            names = _names(self._waiting)
            log.warning("%s: not copied within %g s: %s", self.target, COPY_TIMEOUT, names)
            self._idle.set()

    async def finish(self) -> None:
        """All copies, what failed once more; tells what stays without a copy."""
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
            except Exception as error:  # of whatever is behind the URL: training goes on
                log.warning("%s was not copied to %s: %s", checkpoint.name, self.target, error)
        with suppress(RuntimeError):  # the run has ended meanwhile
            loop.call_soon_threadsafe(self._ended, copied, idle)

    def _ended(self, copied: list[Path], idle: asyncio.Event) -> None:
        self._waiting = [checkpoint for checkpoint in self._waiting if checkpoint not in copied]
        idle.set()

    def _copy(self, checkpoint: Path) -> None:
        """The manifest comes last: it means complete."""
        files = sorted(checkpoint.rglob("*"), key=lambda path: path.name == MANIFEST)
        for path in filter(Path.is_file, files):
            there = f"{self._root}/{path.relative_to(checkpoint.parent).as_posix()}"
            self._files.makedirs(there.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(path), there)


def _names(checkpoints: list[Path]) -> str:
    return ", ".join(checkpoint.name for checkpoint in checkpoints)
