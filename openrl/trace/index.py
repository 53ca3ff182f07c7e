"""The index of the trace: index.jsonl, which lists every kept trajectory without opening another
file.

Its first line is ``{"format": 1}``. Each later line is about one step and holds a list for each
column. ``{"event": "played", "step": 3, ...}`` is written before a step trains, ``"evaluated"``
after an evaluation, and ``"learned"`` after the step; the latter's columns are folded into the
rows that they are about."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openrl.errors import UserError
from openrl.files import write_atomically
from openrl.trace.rows import Played

FORMAT = 1
NAME = "index.jsonl"
HEAD = 160  # characters of prompt and text in the index
EVENTS = ("played", "evaluated", "learned")

OF_STEP = ("step", "tag", "version")
OF_PLAYED = (
    "number",
    "group",
    "member",
    "role",
    "prompt_id",
    "source",
    "agent",
    "reward",
    "parts",
    "passed",
    "end",
    "failure",
    "tokens",
    "prompt_tokens",
    "turns",
    "segments",
    "replays",
    "engine",
    "seconds",
    "tool_calls",
    "policy_versions",
    "flat",
    "prompt",
    "text",
    "chars",
)
OF_LEARNED = (
    "trained_tokens",
    "advantage",
    "age",
    "gap_mean",
    "gap_max",
    "entropy",
    "weight",
    "clipped",
    "loss",
    "optimizer_step",
)
COLUMNS = (*OF_STEP, *OF_PLAYED, *OF_LEARNED)
"""All columns of ``Trace.index``, which docs/trace.md explains."""

Columns = dict[str, list[Any]]


def played_columns(played: Sequence[Played]) -> Columns:
    """Return what the index says of trajectories as they were played."""
    rows = [_played_values(p) for p in played]
    return {name: [row[n] for row in rows] for n, name in enumerate(("tag", *OF_PLAYED))}


def _played_values(played: Played) -> tuple[Any, ...]:
    """Return the values of ``tag`` and of OF_PLAYED."""
    group, t = played.group, played.trajectory
    score = t.score
    first = t.segments[0] if t.segments else None
    return (
        played.tag,
        played.number,
        played.place,
        played.member,
        played.role,
        group.prompt.id,
        group.prompt.source,
        t.agent,
        rounded(score.reward) if score else None,
        {name: rounded(part) for name, part in score.parts.items()} if score else {},
        rounded(score.passed) if score and score.passed is not None else None,
        t.finish_reason.value,
        t.any_failure,
        t.response_length,
        first.context_length if first else 0,
        t.turns,
        len(t.segments),
        t.replays,
        t.engine,
        None if t.seconds is None else rounded(t.seconds),
        len(t.tool_uses),
        [*t.versions[:1], *t.versions[-1:]],
        group.is_flat,
        group.prompt.text[-HEAD:],
        t.text[:HEAD],
        len(t.text),
    )


def rounded(value: float) -> float | None:
    """Return a number with six digits, which keeps lines short; None if it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def to_line(record: Mapping[str, Any]) -> str:
    """Return a line of the index. Half a surrogate pair, which a policy may write, is escaped."""
    return json.dumps(record, separators=(",", ":")) + "\n"


@dataclass
class Lines:
    """The readable lines of an index, and what is wrong with it."""

    records: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_lines(directory: Path) -> Lines:
    """Read an index. A broken line, such as the last one of a run that was killed, is left out and
    named in ``problems``. Raises UserError if the trace is one of another format."""
    found = Lines()
    broken: list[int] = []
    with open(directory / NAME, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except ValueError:
                broken.append(number)
                continue
            if number == 1:
                _check_format(directory, record)
            elif _is_record(record):
                found.records.append(record)
            else:
                broken.append(number)
    if broken:
        some = ", ".join(map(str, broken[:5])) + (" ..." if len(broken) > 5 else "")
        found.problems.append(
            f"{directory / NAME}: {len(broken)} broken line(s) left out, with their"
            f" trajectories: line {some}"
        )
    return found


def _is_record(record: Any) -> bool:
    """Whether a line is one that a trace has: about a step, with lists of equal length."""
    if not (isinstance(record, dict) and record.get("event") in EVENTS):
        return False
    rows, step = record.get("rows"), record.get("step")
    if not (isinstance(rows, dict) and isinstance(step, int) and "number" in rows):
        return False
    sizes = {len(column) if isinstance(column, list) else -1 for column in rows.values()}
    return len(sizes) == 1 and -1 not in sizes


def _check_format(directory: Path, first: Any) -> None:
    form = first.get("format") if isinstance(first, dict) else None
    if form != FORMAT:
        kind = "no format" if form is None else f"format {form}"
        raise UserError(
            f"{directory} is a trace of {kind}; this version of openrl reads format {FORMAT}",
            "the version of openrl that wrote it",
        )


def fold(records: Sequence[Mapping[str, Any]]) -> Columns:
    """Return the rows of an index by column. What was not measured is None."""
    columns: Columns = {name: [] for name in COLUMNS}
    where: dict[int, int] = {}  # step -> index of its row number 0
    for record in records:
        rows, step = record["rows"], record["step"]
        if record["event"] == "learned":
            if step in where:
                _fold_learned(columns, rows, where[step])
            continue
        before, count = len(columns["step"]), len(rows["number"])
        if record["event"] == "played":
            where[step] = before - (rows["number"][0] if count else 0)
        columns["step"] += [step] * count
        columns["version"] += [record.get("version")] * count
        for name in ("tag", *OF_PLAYED):
            columns[name] += rows.get(name) or [None] * count
        for name in OF_LEARNED:
            columns[name] += [None] * count
    return columns


def _fold_learned(columns: Columns, rows: Mapping[str, list[Any]], start: int) -> None:
    for name in OF_LEARNED:
        column = columns[name]
        for number, value in zip(rows["number"], rows.get(name) or (), strict=False):
            column[start + number] = value


def begin(directory: Path, keep_until: int) -> list[dict[str, Any]]:
    """Write an index that ends with step ``keep_until`` of an earlier part of the run, -1 for a new
    run. Returns the records that it keeps."""
    kept: list[dict[str, Any]] = []
    if keep_until >= 0 and (directory / NAME).exists():
        kept = [r for r in read_lines(directory).records if r["step"] <= keep_until]
    lines = [to_line({"format": FORMAT}), *map(to_line, kept)]
    write_atomically(directory / NAME, "".join(lines))
    return kept
