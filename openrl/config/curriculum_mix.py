"""Shares of data sources that change with the steps: the file of --curriculum_mix."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Any

from openrl.errors import UserError, short
from openrl.flags.sources import read_table

Mix = Mapping[int, Mapping[str, float]]
"""Step -> data source -> weight."""
MIX_SHAPE = "lines of the form  step: {datasource: weight}"


def weights_at(mix: Mix, step: int) -> dict[str, float]:
    """Return the weights at a step: those listed for it, or between two listed steps what lies on
    the line between them. Before the first and after the last they stay as they are."""
    steps = sorted(mix)
    place = bisect.bisect_right(steps, step)
    before, after = steps[max(place - 1, 0)], steps[min(place, len(steps) - 1)]
    done = (step - before) / (after - before) if after > before and step > before else 0.0
    names = sorted({name for row in mix.values() for name in row})
    return {
        name: (1 - done) * mix[before].get(name, 0.0) + done * mix[after].get(name, 0.0)
        for name in names
    }


def read_mix(path: str) -> dict[int, dict[str, float]]:
    """Read the file of --curriculum_mix. Raises UserError."""
    table = read_table(path, "curriculum_mix")
    if not isinstance(table, dict) or not table:
        raise UserError(f"--curriculum_mix: {path} holds no steps", MIX_SHAPE)
    mix: dict[int, dict[str, float]] = {}
    for step, row in table.items():
        where = f"--curriculum_mix: {path}: {short(step)}"
        if not str(step).isdecimal() or int(step) < 1:
            raise UserError(f"{where} is no step; the first is 1", MIX_SHAPE)
        if not isinstance(row, dict) or not row or not all(map(_is_weight, row.values())):
            raise UserError(f"{where} has no weights of 0 or more", MIX_SHAPE)
        if not any(row.values()):
            raise UserError(f"{where}: all weights are 0", "at least one above 0")
        mix[int(step)] = {str(name): float(weight) for name, weight in row.items()}
    return mix


def _is_weight(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value < float("inf")
