"""JSONL output from which a killed run resumes: it holds every unit of work once and whole, in the
order of the work. Trajectories become its rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from transformers import PreTrainedTokenizerBase

from openrl.config.groups.data import EvaluateDataFlags
from openrl.errors import UserError
from openrl.files import as_utf8, write_atomically
from openrl.locks import lock
from openrl.types import PromptGroup, Trajectory

Row = dict[str, Any]  # its "id" is the id of its unit


class Output:
    """Appends the rows of one unit after the other. When a run resumes, a unit that was cut short
    is removed first.

    ``settings`` are the flags that the rows depend on. They are kept beside the output, and a run
    with other settings is refused.
    """

    def __init__(
        self,
        path: Path,
        units: Sequence[str],
        rows_per_unit: int,
        settings: Row,
        figures: Path | None = None,
    ) -> None:
        """``units`` are the ids of all work, in order; ``figures`` is written once all is done.
        Raises UserError if a file holds anything else."""
        self.path, self.units = path, units
        self._settings, self._settings_path = settings, path.with_name(f"{path.name}.flags.json")
        self._size = self._whole = 0  # bytes that were read, and those of whole units
        self._bytes: list[int] = []  # of each row of these
        try:
            self._check_settings([path, figures] if figures else [path])
            kept, self.removed = self._read(rows_per_unit)
        except (ValueError, KeyError, TypeError) as error:  # not JSON, or not what we wrote
            message = f"--output_path: {path} or {self._settings_path.name} is damaged"
            raise UserError(message, "another --output_path") from error
        self.done = self._position(kept) + 1 if kept else 0  # units that need no more work
        self.kept = kept

    def _check_settings(self, written: Iterable[Path]) -> None:
        if not self._settings_path.exists():
            for path in written:
                empty = (
                    path.is_file() and not path.stat().st_size
                )  # left by a run that died at once
                if path.exists() and not empty:
                    message = f"--output_path: {path} was not written by this command"
                    raise UserError(message, "another --output_path")
            return
        before = json.loads(self._settings_path.read_text(encoding="utf-8"))
        now = self._settings
        if changed := [name for name in {**before, **now} if before.get(name) != now.get(name)]:
            lines = "".join(
                f"\n  --{name} was {before.get(name)!r}, is {now.get(name)!r}" for name in changed
            )
            raise UserError(
                f"--output_path: {self.path} was written with different flags:{lines}",
                "the same flags, or another --output_path",
            )

    def _read(self, rows_per_unit: int) -> tuple[list[Row], int]:
        """Return the rows of whole units, and the number of lines to remove."""
        if not self.path.exists():
            return [], 0
        read = self.path.read_bytes()
        lines = read.split(b"\n")
        torn = lines.pop() != b""  # a whole line ends with a newline
        rows = [json.loads(line) for line in lines]
        sizes = [len([*unit]) for _, unit in groupby(rows, key=lambda row: row["id"])]
        # several agents leave more rows than there are samples
        cut = sizes[-1] if rows and sizes[-1] < max(rows_per_unit, *sizes) else 0
        kept = rows[: len(rows) - cut]
        self._size = len(read)
        self._bytes = [len(line) + 1 for line in lines[: len(kept)]]
        self._whole = sum(self._bytes)
        return kept, torn + cut

    def forget(self, first: int) -> None:
        """Have the units from the ``first`` on done again, though the file holds them."""
        before = {*self.units[:first]}
        count = sum(row["id"] in before for row in self.kept)
        self.removed += len(self.kept) - count
        self.kept, self.done = self.kept[:count], min(self.done, first)
        self._whole = sum(self._bytes[:count])

    def _position(self, kept: list[Row]) -> int:
        """Return the position among the units of the file's last row. Raises UserError unless the
        rows are units in order."""
        remaining = iter(enumerate(self.units))
        position = -1
        for unit, _ in groupby(kept, key=lambda row: row["id"]):
            position = next((i for i, name in remaining if name == unit), -1)
            if position < 0:
                raise UserError(
                    f"--output_path: {self.path} holds {unit}, which the data lacks or has in a"
                    " different place",
                    "give the data that it was written from, or another --output_path",
                )
        return position

    def __enter__(self) -> Output:
        """Open the file for this process alone. Raises UserError if another one writes to it, or
        has written to it since it was read."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(self.path, "ab")
        if other := self._other_run():
            self._file.close()
            raise UserError(f"--output_path: {self.path} {other}", "another --output_path")
        write_atomically(self._settings_path, json.dumps(self._settings, indent=1))
        self._file.truncate(self._whole)
        return self

    def _other_run(self) -> str:
        """Lock the open file. Say so if another run has it, or has changed it since we read it."""
        try:
            lock(self._file)
        except BlockingIOError:
            return "is written by another run"
        if os.fstat(self._file.fileno()).st_size != self._size:
            return "was written by another run since this one has read it"
        return ""

    def write(self, rows: Iterable[Row]) -> None:
        """Append the rows of one unit; they are on disk when this returns. Raises UserError if they
        cannot be written; what was cut short is removed when a run resumes."""
        try:
            self._file.write(as_utf8("".join(map(_line, rows))))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            message = f"{self.path} could not be written: {error.strerror}"
            raise UserError(message, "the same command, once there is room: it goes on") from error

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # what could not be written is still in the buffer
            self._file.close()


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def rows_of(
    unit: str, group: PromptGroup, flags: EvaluateDataFlags, tokenizer: PreTrainedTokenizerBase
) -> list[Row]:
    """Return one row per answer: prompt, response without special tokens, how it ended, and agent,
    label and reward if there are any, in the columns that the flags name."""
    return [
        {
            "id": unit,
            "sample": sample,
            flags.input_key: group.prompt.text,
            flags.output_key: tokenizer.decode(t.response_ids, skip_special_tokens=True),
            "finish": t.finish_reason.value,
            "source": group.prompt.source,
        }
        | ({"agent": t.agent} if t.agent else {})
        | ({} if group.prompt.label == "" else {flags.label_key or "label": group.prompt.label})
        | reward_columns(t)
        for sample, t in enumerate(group.trajectories)
    ]


def reward_columns(trajectory: Trajectory) -> Row:
    """Return ``reward`` (null if it or the episode failed; ``failure`` then says why), ``passed``
    and the reward's parts."""
    given = trajectory.score
    if trajectory.finish_reason.is_failure:
        return {"reward": None, "failure": trajectory.failure}
    if given is None:
        return {}
    columns: Row = {"reward": None if given.dropped else given.reward}
    if given.failure is not None:
        columns["failure"] = given.failure
    if given.passed is not None:
        columns["passed"] = given.passed
    return columns | ({"parts": dict(given.parts)} if given.parts else {})
