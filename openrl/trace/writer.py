"""Writes the trace of a run, in a thread that the steps do not wait for."""

from __future__ import annotations

import errno
import json
import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from openrl.config.groups.logging import TraceFlags
from openrl.files import write_atomically
from openrl.seeds import seed_of
from openrl.trace.index import NAME, begin, played_columns, to_line
from openrl.trace.learned import LearnedStep, learned_columns, learned_rows
from openrl.trace.places import (
    eval_path,
    files_by_step,
    images_dir,
    learned_path,
    pieces_path,
    played_path,
    read_pieces,
)
from openrl.trace.rows import Played, Tag, played_in, played_row
from openrl.trace.tables import LEARNED, PLAYED, write_table
from openrl.types import PromptGroup

FEWEST = 8  # groups of a step that are kept, if it has as many
MOST_FAILED = 16  # groups of a step that are kept because something failed in them
AT_ONCE = 3  # writes that may wait; the next one waits for the first of them
GIB = 1024**3

Pieces = Callable[[list[int]], list[str]]
"""The text of each token."""


class TraceWriter:
    """Writes to ``directory``. ``keep_until`` is the step that a resumed run continues from, -1 for
    a new run, which replaces the trace of an earlier one.

    After the first error the trace stops: every later call raises that error again."""

    def __init__(
        self, directory: Path, flags: TraceFlags, pieces: Pieces | None = None, keep_until: int = -1
    ) -> None:
        self.directory, self.flags, self.pieces = directory, flags, pieces
        images_dir(directory).mkdir(parents=True, exist_ok=True)
        self._files = files_by_step(directory)
        for step in [step for step in self._files if step > keep_until]:
            _delete(self._files.pop(step))
        kept = begin(directory, keep_until)
        self._next = {r["step"]: max(r["rows"]["number"], default=-1) + 1 for r in kept}
        if keep_until < 0:
            pieces_path(directory).unlink(missing_ok=True)
            _delete(images_dir(directory).iterdir())
        self._known = set(read_pieces(directory))
        # the last step that needs each
        self._images = {path.name: keep_until for path in images_dir(directory).iterdir()}
        self._numbers: dict[int, Played] = {}  # of the last step, by the id of the trajectory
        self._bytes = sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())
        self._error: Exception | None = None
        self._pending: deque[Future[None]] = deque()
        self._thread = ThreadPoolExecutor(1, "trace")

    # -- what the run calls ------------------------------------------------------------------------

    def played(
        self,
        step: int,
        groups: Sequence[PromptGroup],
        trained: list[int],
        version: int,
        counts: dict[str, float],
        replayed: Sequence[PromptGroup] = (),
    ) -> None:
        """Keep a sample of the groups of a step, before it trains, and mark them as ``traced``:
        those with transcripts first; and the first groups in which something failed. ``trained``
        are the indices of those that the filter let through. A sample of the ``replayed`` groups,
        of earlier steps, is kept as well, in places behind the others."""
        failed = [n for n, group in enumerate(groups) if any(t.any_failure for t in group.attempts)]
        shown = {n for n, group in enumerate(groups) if group.prompt.render}
        sampled = chosen(_ids(groups), self.flags.trace_sample_rate, step, first=shown)
        kept = sorted({*sampled, *failed[:MOST_FAILED]})
        passed, again = set(trained), chosen(_ids(replayed), self.flags.trace_sample_rate, step)
        tags: dict[int, Tag] = {n: "train" if n in passed else "filtered" for n in kept}
        tags |= {len(groups) + n: "replayed" for n in again}
        every = [*groups, *replayed]
        for place, group in enumerate(every):
            group.traced = place in tags
        rows = self._numbered(step, played_in([(n, every[n]) for n in tags], tags, 0))
        self._numbers = {id(p.trajectory): p for p in rows}
        record = {"event": "played", "step": step, "version": version, "counts": counts}
        record |= {"groups": len(groups), "kept": kept, "trained": trained}
        self._soon(self._write_played, played_path(self.directory, step), record, rows)

    def evaluated(self, step: int, groups: Sequence[PromptGroup]) -> None:
        """Keep the answers of an evaluation, of the same prompts each time."""
        kept = chosen(_ids(groups), self.flags.trace_sample_rate)
        first = self._next.get(step, 0)
        found = played_in([(n, groups[n]) for n in kept], dict.fromkeys(kept, "evaluation"), first)
        rows = self._numbered(step, found)
        versions = [v for g in groups for t in g.trajectories for v in t.versions]
        record = {"event": "evaluated", "step": step, "version": max(versions, default=None)}
        record |= {"groups": len(groups), "kept": kept}
        self._soon(self._write_played, eval_path(self.directory, step), record, rows)

    def learned(self, step: int, learned: LearnedStep) -> None:
        """Keep what training found out about the trajectories of ``played``."""
        self._soon(self._write_learned, step, learned, self._numbers)
        self._numbers = {}

    def close(self) -> None:
        """Write what is left. Raises the error that has stopped the trace."""
        self._thread.shutdown(wait=True)
        if self._error is not None:
            raise self._error

    # -- in the thread -----------------------------------------------------------------------------

    def _numbered(self, step: int, rows: list[Played]) -> list[Played]:
        self._next[step] = rows[-1].number + 1 if rows else self._next.get(step, 0)
        return rows

    def _soon(self, write: Callable[..., None], *args: Any) -> None:
        """Write in the thread. Raises the error that has stopped the trace."""
        if self._error is not None:
            raise self._error
        while len(self._pending) >= AT_ONCE:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._guarded, write, *args))

    def _guarded(self, write: Callable[..., None], *args: Any) -> None:
        if self._error is None:
            try:
                write(*args)
                self._make_room()
            except Exception as error:  # the next call raises it
                if isinstance(error, OSError) and error.errno and not error.filename:
                    error.filename = str(self.directory)
                self._error = error

    def _write_played(self, path: Path, record: dict[str, Any], rows: list[Played]) -> None:
        step, pictures = record["step"], dict[str, bytes]()
        table = [played_row(p, pictures) for p in rows]
        for name, data in pictures.items():
            if name not in self._images:
                write_atomically(images_dir(self.directory) / name, data)
                self._bytes += len(data)
            self._images[name] = step
        self._name_tokens(s.token_ids for p in rows for s in p.trajectory.segments)
        self._wrote(step, path, write_table(path, table, PLAYED))
        self._list(record, played_columns(rows))

    def _write_learned(self, step: int, learned: LearnedStep, played: dict[int, Played]) -> None:
        rows = learned_rows(learned, {key: p.number for key, p in played.items()})
        path = learned_path(self.directory, step)
        self._wrote(step, path, write_table(path, rows, LEARNED))
        logprobs = {
            (p.number, place): segment.rollout_logprobs
            for p in played.values()
            for place, segment in enumerate(p.trajectory.segments)
        }
        self._list({"event": "learned", "step": step}, learned_columns(rows, logprobs))

    def _list(self, record: dict[str, Any], columns: dict[str, list[Any]]) -> None:
        self._append(self.directory / NAME, to_line(record | {"rows": columns}))

    def _name_tokens(self, token_rows: Iterable[list[int]]) -> None:
        new = sorted(set().union(*token_rows) - self._known)
        if new and self.pieces is not None:
            named = zip(new, self.pieces(new), strict=True)
            self._append(pieces_path(self.directory), "".join(f"{json.dumps(n)}\n" for n in named))
            self._known.update(new)

    def _wrote(self, step: int, path: Path, size: int) -> None:
        self._files.setdefault(step, []).append(path)
        self._bytes += size

    def _append(self, path: Path, text: str) -> None:
        with open(path, "a", encoding="ascii") as file:
            file.write(text)
        self._bytes += len(text)

    def _make_room(self) -> None:
        """Delete the oldest steps beyond the bounds. Raises OSError if that is not enough."""
        if most := self.flags.trace_keep_steps:
            for step in sorted(self._files)[:-most]:
                self._drop(step)
        limit = self.flags.trace_max_gb
        while limit and self._bytes > limit * GIB:
            if len(self._files) < 2:
                message = f"the trace has reached --trace_max_gb {limit:g}"
                raise OSError(errno.EDQUOT, message, str(self.directory))
            self._drop(min(self._files))

    def _drop(self, step: int) -> None:
        """Delete the oldest step, with the images that no later one needs."""
        images = [name for name, last in self._images.items() if last <= step]
        paths = [images_dir(self.directory) / name for name in images]
        self._bytes -= _delete([*self._files.pop(step), *paths])
        for name in images:
            del self._images[name]


def chosen(
    prompts: Sequence[str], share: float, *key: object, first: Container[int] = ()
) -> list[int]:
    """Return the places of the prompts, given by id, whose groups are kept: a ``share`` of them,
    but at least FEWEST, the places in ``first`` before others, chosen by a hash of ``key`` and the
    prompt, so that equal keys choose equal prompts."""
    if share >= 1:
        return list(range(len(prompts)))
    count = max(FEWEST, math.ceil(share * len(prompts)))
    order = sorted(
        range(len(prompts)), key=lambda n: (n not in first, seed_of(*key, prompts[n]), n)
    )
    return sorted(order[:count])


def with_transcript(per_step: int, share: float) -> Callable[[int], bool]:
    """Return a function that says of the n-th prompt of a run, before it is played, whether to keep
    the turns of its episodes: of as many in each ``per_step`` prompts as ``chosen`` keeps."""

    @lru_cache(maxsize=2)
    def of_step(step: int) -> frozenset[int]:
        return frozenset(chosen([*map(str, range(per_step))], share, step))

    return lambda n: n % per_step in of_step(n // per_step)


def _ids(groups: Sequence[PromptGroup]) -> list[str]:
    return [group.prompt.id for group in groups]


def _delete(paths: Iterable[Path]) -> int:
    """Delete files and return how many bytes they had."""
    size = 0
    for path in paths:
        size += path.stat().st_size
        path.unlink()
    return size
