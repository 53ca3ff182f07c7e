"""Applies a function to all rows of a source, in processes where it pays; reports bad rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from operator import itemgetter
from typing import Any, Generic, TypeVar

from datasets import Dataset

from openrl.data.conversations import without_nulls
from openrl.errors import BadRow, UserError, listed

CHUNK = 1000  # rows that are tokenised in one call
PARALLEL_FROM = 50_000  # rows; below this the seconds that a process takes to start do not pay
T = TypeVar("T")
Numbered = list[tuple[int, dict[str, Any]]]  # (row number, row)


@dataclass
class Chunk(Generic[T]):
    """The results of some rows."""

    items: list[T] = field(default_factory=list)
    bad: list[tuple[int, BadRow]] = field(default_factory=list)  # (row number, reason)
    unread_keys: set[str] = field(default_factory=set)  # of messages, see ``Templates``
    marks: set[str] = field(default_factory=set)  # likewise
    remarks: set[str] = field(default_factory=set)  # sentences on columns, likewise

    @property
    def notes(self) -> list[str]:
        """What to say of the messages and of further columns."""
        keys, marks = (
            ", ".join(map(repr, sorted(said))) for said in (self.unread_keys, self.marks)
        )
        notes = [f"the chat template reads no {keys} of messages"] if keys else []
        if marks:
            notes.append(
                f"WARNING: texts of messages hold {marks}, which the chat template writes itself:"
                " if they are rendered already, leave --apply_chat_template out"
            )
        return notes + sorted(self.remarks)


Read = Callable[[Numbered], Chunk[T]]


def read_rows(rows: Dataset, read: Read[T], workers: int) -> Chunk[T]:
    """Apply ``read`` to all rows in order. With several workers it must pickle."""
    whole: Chunk[T] = Chunk()
    for chunk in _chunks(rows, read, min(workers, os.cpu_count() or 1)):
        whole.items += chunk.items
        whole.bad += chunk.bad
        whole.unread_keys |= chunk.unread_keys
        whole.marks |= chunk.marks
        whole.remarks |= chunk.remarks
    return whole


def _chunks(rows: Dataset, read: Read[T], workers: int) -> Iterator[Chunk[T]]:
    pieces = [range(start, min(start + CHUNK, len(rows))) for start in range(0, len(rows), CHUNK)]
    if workers == 1 or len(rows) < PARALLEL_FROM:
        yield from (_read_rows(rows, piece, read) for piece in pieces)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _set_job, (rows, read)) as pool:
        try:
            yield from pool.map(_read_piece, pieces)
        except BrokenProcessPool as error:
            raise UserError(
                "a process that tokenizes rows was killed, perhaps because memory ran out",
                f"--preprocess_num_workers {workers // 2}",
            ) from error


def _read_rows(rows: Dataset, piece: range, read: Read[T]) -> Chunk[T]:
    """Read one piece. A line that is not JSON makes a bad row, as does text that is not UTF-8,
    which Arrow files do not check."""
    try:
        columns = rows[piece.start : piece.stop]  # one row at a time takes 25 times as long
        if rows.format["type"] is None:  # of Arrow's, not parsed from JSON
            columns = {name: list(map(without_nulls, cells)) for name, cells in columns.items()}
        cells = zip(*columns.values(), strict=True)
        found = (dict(zip(columns, row, strict=True)) for row in cells)
        return read(list(zip(piece, found, strict=True)))
    except (UnicodeDecodeError, BadRow):
        good, bad = _decode_rows(rows, piece)
        chunk = read(good)
        return replace(chunk, bad=sorted([*chunk.bad, *bad], key=itemgetter(0)))


def _decode_rows(rows: Dataset, piece: range) -> tuple[Numbered, list[tuple[int, BadRow]]]:
    good: Numbered = []
    bad = []
    for number in piece:
        try:
            good.append((number, rows[number]))
        except UnicodeDecodeError:
            bad.append((number, BadRow("text that is not UTF-8")))
        except BadRow as reason:
            bad.append((number, reason))
    return good, bad


_job: tuple[Dataset, Read[Any]]  # of this worker process


def _set_job(rows: Dataset, read: Read[Any]) -> None:
    global _job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _job = rows, read


def _read_piece(piece: range) -> Chunk[Any]:
    rows, read = _job
    return _read_rows(rows, piece, read)


def refuse_bad_rows(flag: str, bad: Iterable[tuple[str, list[tuple[int, BadRow]]]]) -> None:
    """Raise one UserError for all bad rows, if any, given as (source, [(row, reason)]), with
    what the limits would have to be."""
    blocks = []
    enough: dict[str, int] = {}
    for source, rows in bad:
        by_reason: dict[str, list[int]] = {}
        for number, reason in rows:
            by_reason.setdefault(str(reason), []).append(number)
            if reason.flag:
                enough[reason.flag] = max(reason.enough, enough.get(reason.flag, 0))
        lines = []
        for text, numbers in by_reason.items():
            lines.append(f"row{'s' if len(numbers) > 1 else ''} {listed(numbers)}: {text}")
        if lines:
            head = f"--{flag}: {source} has rows that cannot be used (counted from 0)"
            blocks.append("\n  ".join([head, *lines]))
    if blocks:
        remedy = " ".join(f"--{name} {needed}" for name, needed in enough.items())
        raise UserError("\n".join(blocks), remedy)
