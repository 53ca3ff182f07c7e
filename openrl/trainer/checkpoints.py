"""Checkpoints on disk: written aside, renamed when complete, old ones removed afterwards.

<ckpt_path>/step_000004/
    manifest.json     schema version, step, flags of the run; in a renamed directory it means
                      complete
    state.json        what the driver must know to go on: data position, KL controller, counters
    actor/ critic/    what each training engine wrote of itself
    hf/               a Hugging Face copy, with --save_hf_ckpt
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from openrl.config.derived import COMPLETE_CHECKPOINTS
from openrl.config.run import CheckpointFlags
from openrl.errors import UserError
from openrl.training.state import StateParts

SCHEMA_VERSION = 5
"""Raised whenever the layout of a checkpoint or of its state changes: an older one is refused,
never half read."""


class Checkpoints:
    """The checkpoints of one run. Those that it does not go on from, all with --overwrite_ckpt or
    later ones than that of --resume_from_checkpoint, go once the first new one is complete.

    Where several processes run the same driver, one of them ``leads``; the others write only their
    engines' parts."""

    def __init__(self, flags: CheckpointFlags, leads: bool = True) -> None:
        self.directory, self.keep, self.leads = Path(flags.ckpt_path), flags.max_ckpt_num, leads
        self.most_bytes = flags.max_ckpt_mem * 1e9
        self.resumable = not flags.disable_ds_ckpt
        self.written, self.read = (
            StateParts(flags.save_optim, flags.save_rng),
            StateParts(flags.load_optim, flags.load_rng),
        )
        self.start_from: Path | None = None
        if flags.resume_from_checkpoint is not None:
            self.start_from = Path(flags.resume_from_checkpoint).expanduser()
        elif flags.load_checkpoint:
            resumable = (
                path for path in reversed(self.complete()) if manifest_of(path)["resumable"]
            )
            self.start_from = next(resumable, None)
        last = (
            -1
            if flags.overwrite_ckpt
            else step_of(self.start_from)
            if self.start_from
            else math.inf
        )
        self._stale = [path for path in self.complete() if step_of(path) > last]

    async def save(
        self,
        step: int,
        state: dict[str, Any],
        flags: dict[str, Any],
        write: Callable[[Path], Awaitable[None]],
        metric: float | None = None,
    ) -> Path:
        """``write(directory)`` puts the engines' parts into the directory before it is renamed. The
        one with the highest ``metric`` is kept besides the newest.

        If it raises, the checkpoints are as before; what it wrote goes with the next save.
        """
        final = self.directory / f"step_{step:06d}"
        aside = self.directory / f".writing_{final.name}"
        if not self.leads:
            await write(aside)
            return final
        for left_over in self.directory.glob(".writing_*"):
            shutil.rmtree(left_over)
        aside.mkdir(parents=True)
        await write(aside)
        write_json(aside / "state.json", state)
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "step": step,
            "resumable": self.resumable,
            "metric": metric,
        }
        write_json(aside / "manifest.json", manifest | {"flags": flags})
        sync_tree(aside)
        if (
            final.exists()
        ):  # of an earlier run, with --overwrite_ckpt; it goes with the next save at the latest
            final.rename(replaced := self.directory / f".writing_{final.name}_replaced")
            aside.rename(final)
            shutil.rmtree(replaced)
        else:
            aside.rename(final)
        sync(self.directory)
        self._retain(final)
        return final

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted((p.parent for p in self.directory.glob(COMPLETE_CHECKPOINTS)), key=step_of)

    def _retain(self, newest: Path) -> None:
        """Remove what this run does not go on from; then all but the ``keep`` newest (0: all), the
        best by its metric, and what fits into ``most_bytes``."""
        for path in self._stale:
            if path != newest:
                shutil.rmtree(path)
        self._stale = []
        found = self.complete()
        manifests = {path: manifest_of(path) for path in found}
        measured = [path for path in found if manifests[path]["metric"] is not None]
        best = max(measured, key=lambda path: manifests[path]["metric"], default=None)
        kept = [path for path in found if path in found[-self.keep :] or path == best]
        while len(kept) > 1 and sum(map(bytes_of, kept)) > self.most_bytes:
            kept.remove(next(path for path in kept if path != newest))
        for path in found:
            if path not in kept:
                shutil.rmtree(path)


def bytes_of(directory: Path) -> int:
    """What the files below ``directory`` take."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """Raises UserError if the checkpoint was laid out by another version."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    if manifest["schema_version"] != SCHEMA_VERSION:
        raise UserError(
            f"{checkpoint} has schema version {manifest['schema_version']}, this is"
            f" {SCHEMA_VERSION}",
            "resume with the version of openrl that wrote it, or start fresh with --overwrite_ckpt",
        )
    return manifest


def changed_flags(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """One line on the flags that differ between a checkpoint and the run that resumes it."""
    names = sorted(name for name, value in now.items() if before.get(name) != value)
    return f"flags that differ: {', '.join(names)}" if names else "same flags"


def step_of(checkpoint: Path | None) -> int:
    """The step after which a checkpoint was written; -1 for none."""
    return -1 if checkpoint is None else int(checkpoint.name.removeprefix("step_"))


def read_state(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state, flags) of a complete checkpoint. Raises UserError if its schema is another one."""
    manifest = manifest_of(checkpoint)
    if not manifest["resumable"]:
        raise UserError(
            f"{checkpoint} was written with --disable_ds_ckpt: nothing resumes from it",
            f"--pretrain {checkpoint / 'hf'}",
        )
    return json.loads((checkpoint / "state.json").read_text()), manifest["flags"]


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def sync_tree(directory: Path) -> None:
    """Force files and directories to disk, so that the rename never publishes empty ones after a
    power cut."""
    for path in (*directory.rglob("*"), directory):
        sync(path)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
