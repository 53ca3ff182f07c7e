"""How hard a prompt is, from a column of the data."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from openrl.data.reading import refuse_bad_rows
from openrl.data.rows import MISSING, BadRow, column
from openrl.types import Prompt


def add_difficulty(prompts: list[Prompt], key: str, source: str) -> list[Prompt]:
    """Return the prompts with ``difficulty`` from the column ``key`` of their rows
    (``Prompt.meta``); dots in the key reach into nested columns.

    Raises UserError, which names all rows where it is missing or not a number in [0, 1].
    """
    # source -> row -> reason; a dict, because a blend holds some rows several times
    bad: dict[str, dict[int, str]] = defaultdict(dict)
    rated = []
    for prompt in prompts:
        try:
            rated.append(replace(prompt, difficulty=_read(prompt.meta, key)))
        except BadRow as reason:
            where, _, row = prompt.id.rpartition(":")
            bad[where.partition(":")[2] or source][int(row)] = str(reason)
    refuse_bad_rows("difficulty_key", [(name, sorted(rows.items())) for name, rows in bad.items()])
    return rated


def _read(row: dict[str, Any], key: str) -> float:
    value = column(row, key)
    if value is MISSING:
        raise BadRow(f"no column {key!r}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise BadRow(f"{key!r} must be a number in [0, 1], found {value!r}")
    return float(value)
