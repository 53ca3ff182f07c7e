"""The trajectories of a report: a table of all that the trace keeps, and many of them in full.

Everything is a list per column. A column of texts that repeat is a list of distinct texts and a
list of places in it, one of equal values is that value; a list with few changes is a list of
lengths."""

from __future__ import annotations

import base64
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openrl.report.highlights import Highlights, find_highlights
from openrl.trace.index import Columns
from openrl.trace.reader import Trace
from openrl.trace.show import COLOURINGS
from openrl.tracking.jsonl import plain

MOST_ROWS = 100_000  # of the table
MOST_TOKENS = 500_000  # of the trajectories in full
MOST_IMAGE_BYTES = 8 * 2**20
GOLDEN = 0.6180339887  # multiples spread evenly, however many are taken

_REPEATED = (
    "tag",
    "role",
    "prompt_id",
    "source",
    "agent",
    "end",
    "failure",
    "prompt",
    "policy_versions",
)
_UNSHOWN = ("version", "segments", "chars", "prompt_tokens")
_ALWAYS_LISTS = ("step", "number", "text")
_FACTS = (
    "label",
    "meta",
    "turns",
    "replays",
    "failure",
    "fault",
    "seed",
    "metrics",
    "engine",
    "sampling_seed",
    "seconds",
    "tool_uses",
    "score",
    "shaped",
    "estimate",
    "loss_weight",
    "rendered",
)
_MIME = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"))


@dataclass(frozen=True)
class RolloutTable:
    """The trajectories of one run as a page holds them."""

    table: dict[str, Any]  # columns
    full: dict[int, dict[int, Any]]  # by step, then by number
    pieces: list[str]  # texts of tokens, which "ids" count
    images: dict[str, str]  # URL of the data by hash
    highlights: Highlights
    notes: list[str] = field(default_factory=list)


def read_rollouts(trace: Trace) -> RolloutTable:
    """Return the trajectories of a trace, sampled where there are too many for a page."""
    everything = trace.index()
    kept = _sampled(everything)
    columns = {name: [column[n] for n in kept] for name, column in everything.items()}
    highlights = find_highlights(columns)
    chosen = _in_full(columns, highlights.rows)
    full, texts, pieces = _read_full(trace, columns, chosen)
    columns["text"] = [texts.get(n, text) for n, text in enumerate(columns["text"])]
    count, total, whole = len(kept), len(everything["step"]), len(texts)
    notes = []
    if count < total:
        notes.append(f"The table has {count} of {total} kept trajectories: whole groups, evenly.")
    if whole < count:
        notes.append(
            f"{whole} of {count} trajectories are here with every token; the search looks through"
            " the whole answers of these and the beginnings of the others. `--serve` shows any."
        )
    images = _images(trace, full)
    return RolloutTable(_packed(columns), full, pieces.texts, images, highlights, notes)


def _groups(columns: Columns) -> dict[tuple[Any, ...], list[int]]:
    """Return the rows of each group."""
    found: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    evaluated = (tag == "evaluation" for tag in columns["tag"])
    keys = zip(columns["step"], evaluated, columns["group"], strict=True)
    for row, key in enumerate(keys):
        found[key].append(row)
    return found


def _sampled(columns: Columns) -> Sequence[int]:
    """Return the rows to show: whole groups, evenly over the run."""
    count = len(columns["step"])
    if count <= MOST_ROWS:
        return range(count)
    groups = [*_groups(columns).values()]
    stride = count / MOST_ROWS
    taken = (groups[int(n * stride)] for n in range(int(len(groups) / stride)))
    return sorted(row for group in taken for row in group)


def _in_full(columns: Columns, first: Iterable[int]) -> set[int]:
    """Return the rows to show with all tokens: those that come first, with their siblings, and then
    groups all over the run, as many as MOST_TOKENS allows."""
    groups = [*_groups(columns).values()]
    place = {row: n for n, group in enumerate(groups) for row in group}
    spread = sorted(range(len(groups)), key=lambda n: (n * GOLDEN) % 1.0)
    order = dict.fromkeys([*(place[row] for row in first), *spread])
    chosen: set[int] = set()
    left = MOST_TOKENS
    for group in order:
        rows = groups[group]
        size = sum((columns["tokens"][r] or 0) + (columns["prompt_tokens"][r] or 0) for r in rows)
        if size <= left:
            left -= size
            chosen.update(rows)
    return chosen


class Pieces:
    """The texts of tokens, each once."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    @property
    def texts(self) -> list[str]:
        return [*self.places]

    def of(self, texts: Iterable[str]) -> list[int]:
        return [self.places.setdefault(text, len(self.places)) for text in texts]


def _read_full(
    trace: Trace, columns: Columns, chosen: set[int]
) -> tuple[dict[int, dict[int, Any]], dict[int, str], Pieces]:
    """Return the chosen trajectories by step and number, and their texts by row."""
    rows: dict[int, dict[int, int]] = defaultdict(dict)
    for row in sorted(chosen):
        rows[columns["step"][row]][columns["number"][row]] = row
    full: dict[int, dict[int, Any]] = {}
    texts: dict[int, str] = {}
    pieces = Pieces()
    for step, by_number in rows.items():
        for found in trace.trajectories(step):
            if (number := found["number"]) in by_number:
                texts[by_number[number]] = found["text"]
                full.setdefault(step, {})[number] = in_full(found, pieces)
    return full, texts, pieces


def in_full(found: Mapping[str, Any], pieces: Pieces) -> dict[str, Any]:
    """Return one trajectory, as ``Trace.trajectory`` gives it, with every token."""
    record = {name: plain(found[name]) for name in _FACTS if found[name] not in (None, [], {})}
    return record | {"segments": [_segment(segment, pieces) for segment in found["segments"]]}


def _segment(segment: Mapping[str, Any], pieces: Pieces) -> dict[str, Any]:
    columns = {name: colouring.values(segment) for name, colouring in COLOURINGS.items()}
    columns |= {"logprob": segment["rollout_logprobs"], "sampled": segment["loss_mask"]}
    lists = {name: by_runs(values) for name, values in columns.items() if values is not None}
    return {
        "ids": pieces.of(segment["pieces"]),
        **lists,
        "images": [image["sha256"] for image in segment["images"]],
    }


def by_runs(values: Sequence[Any]) -> Any:
    """Return a list with four digits a number; with few changes, {"runs": [value, length, ...]}.

    >>> by_runs([0.0, 0.0, 0.0, 0.123456])
    {'runs': [0, 3, 0.1235, 1]}
    """
    runs: list[list[Any]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    if 2 * len(runs) <= len(values):
        return {"runs": [part for value, count in runs for part in (_short(value), count)]}
    return [_short(value) for value in values]


def _short(value: Any) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.4g}")
    return int(short) if short == int(short) else short


def _packed(columns: Columns) -> dict[str, Any]:
    return {name: _pack(name, column) for name, column in columns.items() if name not in _UNSHOWN}


def _pack(name: str, column: Sequence[Any]) -> Any:
    if name in _REPEATED:
        return repeated(column)
    same = name not in _ALWAYS_LISTS and column and all(value == column[0] for value in column)
    return {"all": column[0]} if same else column


def repeated(column: Sequence[Any]) -> dict[str, list[Any]]:
    """Return {"values": distinct values, "places": of each entry in them}."""
    places: dict[str, int] = {}
    values: list[Any] = []
    found = []
    for value in column:
        key = repr(value)
        if key not in places:
            places[key] = len(values)
            values.append(value)
        found.append(places[key])
    return {"values": values, "places": found}


def _images(trace: Trace, full: Mapping[int, Mapping[int, Any]]) -> dict[str, str]:
    """Return the images of the trajectories in full, as many as a page may hold."""
    records = (record for by_number in full.values() for record in by_number.values())
    hashes = dict.fromkeys(name for record in records for name in images_in(record))
    found: dict[str, str] = {}
    left = MOST_IMAGE_BYTES
    for name in hashes:
        try:
            data = trace.image(name)
        except OSError:
            continue  # the page says that the image is not there
        if len(data) <= left:
            left -= len(data)
            found[name] = data_url(data)
    return found


def images_in(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the hashes of what a trajectory in full shows: what the policy saw, then what its
    environment drew."""
    for segment in record["segments"]:
        yield from segment["images"]
    for turn in record.get("rendered", ()):
        for message in turn["messages"]:
            yield from message["images"]
        if turn["frame"] is not None:
            yield turn["frame"]


def data_url(data: bytes) -> str:
    mime = next((mime for start, mime in _MIME if data.startswith(start)), "png")
    return f"data:image/{mime};base64,{base64.b64encode(data).decode()}"
