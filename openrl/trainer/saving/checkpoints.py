"""Checkpoints on disk. A checkpoint is written to a temporary directory and renamed when complete;
old ones are removed afterwards.

<ckpt_path>/step_000004/
    manifest.json     schema version, step, flags of the run, sizes and checksums of all files; in
                      a renamed directory it means that the checkpoint is complete
    state.json        what the driver needs to resume: data position, KL controller, counters
    actor/ critic/    the state of each training engine
    hf/               a Hugging Face copy, with --save_hf_ckpt
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from openrl.config.groups.checkpoint import CHECKPOINT_NAME, CheckpointFlags
from openrl.errors import UserError
from openrl.flags.values import show
from openrl.locks import locked
from openrl.trainer.saving.disk import DiskFull, disk_is_full, first_line, require_room
from openrl.trainer.saving.integrity import (
    MANIFEST,
    add_checksum,
    find_damage,
    fingerprints,
    read_manifest,
)
from openrl.trainer.saving.uploads import Uploads
from openrl.training_engine.state import StateParts

log = logging.getLogger(__name__)
SaveState = Callable[[Path, StateParts], Awaitable[None]]
Export = Callable[[Path], Awaitable[None]]

SCHEMA_VERSION = 9
"""Increased whenever the layout of a checkpoint or of its state changes."""
READABLE_VERSIONS = (7, 8, SCHEMA_VERSION)
"""A checkpoint with another version is refused, never half read. Versions 7 and 8 have no running
baselines of agents and no adapted coefficient of the entropy. Version 7 has other names for
filtered groups and for the order of prompts, and may hold turns of unfinished episodes, which start
over."""


class Checkpoints:
    """The checkpoints of one run. Once its first new checkpoint is complete, the stale ones of an
    earlier run are removed: all with --overwrite_ckpt, otherwise those later than the checkpoint
    that the run resumed from."""

    def __init__(self, flags: CheckpointFlags, run_flags: Mapping[str, Any]) -> None:
        """``run_flags`` are the effective flags of the run, saved with each checkpoint."""
        self.flags, self.wrote = flags, False
        self.directory, self.keep = Path(flags.ckpt_path), flags.max_ckpt_num
        self.run_flags = dict(run_flags)
        self.most_bytes = flags.max_ckpt_mem * 1e9
        self.resumable, self.exports = not flags.disable_ds_ckpt, flags.save_hf_ckpt
        self.written = StateParts(flags.save_optim, flags.save_rng)
        self.read = StateParts(flags.load_optim, flags.load_rng)
        self.uploads = Uploads(flags.ckpt_upload_dir) if flags.ckpt_upload_dir else None
        self._bytes = 0  # size of the newest checkpoint, an estimate for the next one
        self.start_from, self.notes = find_start(flags)
        self.saved = max(step_of(self.start_from), 0)  # the step of the newest checkpoint
        last: float = step_of(self.start_from) if self.start_from else math.inf
        last = -1 if flags.overwrite_ckpt else last
        self._stale = [path for path in self.complete() if step_of(path) > last]

    def resume(self, note: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
        """Return the checkpoint to resume from and its state, if there is one. Tells ``note`` which
        one it is, and which ones were passed over."""
        for passed in self.notes:
            note(passed)
        if self.start_from is None:
            return None
        state, flags = read_state(self.start_from)
        note(f"resumed from {self.start_from}; {changed_flags(flags, self.run_flags)}")
        return self.start_from, state

    async def save(
        self,
        step: int,
        state: dict[str, Any],
        save: SaveState,
        export: Export,
        metric: float | None = None,
    ) -> Path:
        """Save a checkpoint and return its path. ``save(directory, parts)`` writes what the engines
        need to resume, ``export(directory)`` a Hugging Face copy, each if flags ask for it and
        before the directory is renamed. The checkpoint with the highest ``metric`` is kept besides
        the newest.

        If either raises, the existing checkpoints stay as they are, and the next save removes
        the partial files. Raises DiskFull if the disk is full, and then leaves no partial files.
        """
        final = self.directory / f"step_{step:06d}"
        aside = self.directory / f".writing_{final.name}"
        manifest: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "step": step}
        manifest |= {"metric": metric, "resumable": self.resumable, "flags": self.run_flags}

        try:
            require_room(self.directory, self._bytes, "a checkpoint")
            for left_over in self.directory.glob(".writing_*"):
                remove(left_over)
            aside.mkdir(parents=True)
            if self.resumable:
                await save(aside, self.written)
            if self.exports:
                await export(aside / "hf")
            write_json(aside / "state.json", state)
            manifest["files"] = await asyncio.to_thread(fingerprints, aside)
            write_json(aside / MANIFEST, add_checksum(manifest))
            sync_tree(aside)
            await self._publish(aside, final)
        except Exception as error:
            if not disk_is_full(error):
                raise
            shutil.rmtree(aside, ignore_errors=True)
            raise DiskFull(f"{final} could not be written: {first_line(error)}") from error
        self.saved, self.wrote = step, True
        return final

    async def _publish(self, aside: Path, final: Path) -> None:
        """Give a complete checkpoint its name, remove old ones, and begin to copy it."""
        # left by an earlier run, with --overwrite_ckpt; the next save removes it at the latest
        if final.exists():
            final.rename(replaced := self.directory / f".writing_{final.name}_replaced")
            aside.rename(final)
            remove(replaced)
        else:
            aside.rename(final)
        sync(self.directory)
        self._bytes = directory_size(final)
        if self.uploads:
            await self.uploads.idle()
        self._retain(final)
        if self.uploads:
            self.uploads.begin(final)

    def resume_flags(self) -> CheckpointFlags:
        """Return the flags with which the run continues from its newest checkpoint. Before it has
        written one these are its own flags: what lies there is of an earlier run, or later than
        where this one began."""
        if not self.wrote:
            return self.flags
        return replace(
            self.flags,
            load_checkpoint=self.flags.load_checkpoint or True,
            resume_from_checkpoint=None,
            overwrite_ckpt=False,
        )

    async def finish(self) -> None:
        """Wait until complete checkpoints are copied to --ckpt_upload_dir, if there is one."""
        if self.uploads:
            await self.uploads.finish()

    def complete(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        return [path for path in checkpoints_in(self.directory) if os.path.exists(path / MANIFEST)]

    def _retain(self, newest: Path) -> None:
        """Remove stale checkpoints of an earlier run. Of the others keep the ``keep`` newest (0:
        all) and the best by metric, then remove the oldest until the rest fits ``most_bytes``."""
        for path in self._stale:
            if path != newest:
                remove(path)
        self._stale = []
        found = self.complete()
        sound = [path for path in found if not find_damage(path, False)]
        metrics: dict[Path, Any] = {path: read_manifest(path).get("metric") for path in sound}
        measured = [path for path, metric in metrics.items() if metric is not None]
        best = max(measured, key=lambda path: metrics[path], default=None)
        kept = [path for path in found if path in found[-self.keep :] or path == best]
        while len(kept) > 1 and sum(map(directory_size, kept)) > self.most_bytes:
            kept.remove(next(path for path in kept if path != newest))
        for path in found:
            if path not in kept:
                remove(path)


@contextmanager
def own_directories(flags: CheckpointFlags) -> Iterator[None]:
    """Own --save_path and --ckpt_path inside. Raises UserError if another run owns one of them."""
    names = ("ckpt_path", "save_path")
    flag_of = {Path(getattr(flags, name)).expanduser().resolve(): name for name in names}
    with ExitStack() as stack:
        for directory, name in flag_of.items():
            stack.enter_context(locked(directory, name))
        yield


def find_start(flags: CheckpointFlags, deep: bool = True) -> tuple[Path | None, list[str]]:
    """Find the checkpoint to resume from: that of --resume_from_checkpoint, or with
    --load_checkpoint the newest undamaged one in --ckpt_path. Returns it, if there is one, and
    notes for the user: on damaged ones that were passed over, or that there is none.

    Raises UserError if the named checkpoint is damaged, if all checkpoints are, if the newest is
    and ``--load_checkpoint strict`` is set, or if the one found has another schema version. Without
    ``deep`` the contents of files are not read."""
    if flags.resume_from_checkpoint is not None:
        path = Path(flags.resume_from_checkpoint).expanduser()
        if wrong := find_damage(path, deep):
            remedy = "another one, or --load_checkpoint for the newest complete one in --ckpt_path"
            raise UserError(f"--resume_from_checkpoint {path}: {wrong}", remedy)
        manifest_of(path)
        return path, []
    if not flags.load_checkpoint:
        return None, []
    notes: list[str] = []
    directory = Path(flags.ckpt_path).expanduser()
    for path in reversed(checkpoints_in(directory)):
        if wrong := find_damage(path, deep):
            notes.append(f"{path}: {wrong}")
            if flags.load_checkpoint == "strict":
                break
        elif manifest_of(path)["resumable"]:
            return path, [f"WARNING: skipped a damaged checkpoint: {note}" for note in notes]
    if notes:
        kind = "the newest checkpoint" if flags.load_checkpoint == "strict" else "every checkpoint"
        listing = "".join(f"\n  {note}" for note in notes)
        raise UserError(
            f"--load_checkpoint: {kind} is damaged:{listing}",
            "--load_checkpoint without strict for an older one, or --overwrite_ckpt to start fresh",
        )
    note = f"--load_checkpoint: no complete checkpoint in {flags.ckpt_path}, starting fresh"
    return None, [note]


def checkpoints_in(directory: Path) -> list[Path]:
    """Return what has the name of a checkpoint, complete or not, oldest first. A copy that somebody
    named step_000004.old is none."""
    named = (path for path in directory.glob("step_*") if CHECKPOINT_NAME.fullmatch(path.name))
    return sorted(named, key=step_of)


def remove(path: Path) -> None:
    """Remove a checkpoint that is no longer needed; of a link, only the link. What cannot be
    removed stays: it takes space and does no other harm."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        log.warning("%s could not be removed: %s", path, error)


def directory_size(directory: Path) -> int:
    """Return the total size in bytes of the files below ``directory``."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest. Raises UserError if it has another schema version."""
    manifest = read_manifest(checkpoint)
    if manifest["schema_version"] not in READABLE_VERSIONS:
        found = manifest["schema_version"]
        raise UserError(
            f"{checkpoint} has schema version {found}, this is {SCHEMA_VERSION}",
            "resume with the version of openrl that wrote it, or start fresh with --overwrite_ckpt",
        )
    return manifest


def changed_flags(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a line on the flags that differ between a checkpoint and the run that resumes it, each
    with its value then and now."""
    differ = [name for name in sorted(now) if before.get(name) != now[name]]
    values = {name: tuple(show(flags.get(name)) for flags in (before, now)) for name in differ}
    changes = [f"--{name} {then} -> {value}" for name, (then, value) in values.items()]
    return f"flags that differ: {', '.join(changes)}" if changes else "same flags"


def step_of(checkpoint: Path | None) -> int:
    """Return the step after which a checkpoint was written; -1 for None."""
    return -1 if checkpoint is None else int(checkpoint.name.removeprefix("step_"))


def read_state(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (state, flags) of a complete checkpoint. Raises UserError if it has another schema
    version or cannot be resumed from."""
    manifest = manifest_of(checkpoint)
    if not manifest["resumable"]:
        problem = f"{checkpoint} was written with --disable_ds_ckpt, so no run can resume from it"
        raise UserError(problem, f"--pretrain {checkpoint / 'hf'}")
    return json.loads((checkpoint / "state.json").read_text()), manifest["flags"]


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def sync_tree(directory: Path) -> None:
    """Force all to disk, so that after a power cut a renamed directory never has empty files."""
    for path in (*directory.rglob("*"), directory):
        sync(path)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
