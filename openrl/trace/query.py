"""Filters and sorts the index of a trace."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from openrl.errors import UserError
from openrl.trace.index import COLUMNS, HEAD, Columns
from openrl.trace.reader import Trace


@dataclass(frozen=True)
class Query:
    """Which trajectories to list, in which order. None does not filter."""

    step: tuple[int, int] | None = None  # first and last
    source: str | None = None
    tag: str | None = None
    agent: str | None = None
    prompt_id: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    failed: bool | None = None  # True: the infrastructure or the reward failed
    text: str | None = None  # occurs in prompt or response, whatever the case of letters
    sort: str = "step"  # a column; with "-" before it the largest first

    @property
    def filters(self) -> list[str]:
        """The filters that are set, for messages."""
        given = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name != "sort")
        return [f"--{name}" for name, value in given if value is not None]


def select(trace: Trace, columns: Columns, query: Query) -> list[int]:
    """Return the rows of ``columns`` that the query asks for, in its order. Rows that lack the
    column to sort by come last. Raises UserError if there is no such column."""
    rows: Sequence[int] = range(len(columns["step"]))
    for name, test in _tests(query):
        column = columns[name]
        rows = [row for row in rows if test(column[row])]
    if query.text is not None:
        rows = _with_text(trace, columns, rows, query.text.lower())
    return _sorted(columns, rows, query.sort)


def _tests(query: Query) -> list[tuple[str, Callable[[Any], bool]]]:
    """Return the columns to test, each with its test."""
    tests: list[tuple[str, Callable[[Any], bool]]] = []
    if query.step is not None:
        first, last = query.step
        tests.append(("step", lambda step: first <= step <= last))
    for name in ("source", "tag", "agent", "prompt_id"):
        if (wanted := getattr(query, name)) is not None:
            tests.append((name, partial(operator.eq, wanted)))
    if (low := query.reward_min) is not None:
        tests.append(("reward", lambda reward: reward is not None and reward >= low))
    if (high := query.reward_max) is not None:
        tests.append(("reward", lambda reward: reward is not None and reward <= high))
    if (failed := query.failed) is not None:
        tests.append(("failure", lambda failure: (failure is not None) == failed))
    return tests


def _with_text(trace: Trace, columns: Columns, rows: Sequence[int], text: str) -> list[int]:
    """Return the rows whose prompt or response has the text. Only what the index cuts short is
    read from the files."""
    found, unsure = set(), dict[tuple[int, int], int]()
    for row in rows:
        response, prompt = columns["text"][row], columns["prompt"][row]
        if text in response.lower() or text in prompt.lower():
            found.add(row)
        elif columns["chars"][row] > HEAD or len(prompt) == HEAD:
            unsure[columns["step"][row], columns["number"][row]] = row
    for step in sorted({step for step, _ in unsure}):
        found.update(
            unsure[step, number]
            for number, whole in trace.texts(step)
            if (step, number) in unsure and text in whole.lower()
        )
    return sorted(found)


def _sorted(columns: Columns, rows: Sequence[int], by: str) -> list[int]:
    name = by.removeprefix("-")
    if name not in COLUMNS or name in ("parts", "policy_versions"):
        known = (c for c in COLUMNS if c not in ("parts", "policy_versions"))
        raise UserError(f"--sort {by}: no such column", f"one of {', '.join(known)}")
    column = columns[name]
    known_rows = [row for row in rows if column[row] is not None]
    missing = [row for row in rows if column[row] is None]
    order = sorted(known_rows, key=lambda row: column[row], reverse=by.startswith("-"))
    return [*order, *missing]
