"""The rows of the table of metrics, which the command, docs/metrics.md and reports read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from openrl.extension_points import metric_names
from openrl.tracking.metric_table import TABLE

PLACE = re.compile(r"[A-Z]+")
OF_USERS = ("NAME", "PART")
"""Places that hold any name a user's code chooses; a row with one of them matches last."""


@dataclass(frozen=True)
class MetricRow:
    """One metric, or a family of them if ``name`` has words in capitals."""

    name: str
    theme: str
    formula: str
    unit: str
    healthy: str  # empty: no bound
    when: str  # empty: always

    @property
    def pattern(self) -> str:
        """A regular expression that matches the names of the family."""
        parts = PLACE.split(self.name)
        return ".+".join(map(re.escape, parts))

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Less comes first where several rows match: exact names, then the longest fixed part."""
        places = PLACE.findall(self.name)
        fixed = len(self.name) - sum(map(len, places))
        return any(place in OF_USERS for place in places), len(places), -fixed


def read_table(text: str) -> Iterator[MetricRow]:
    """Yield the rows of a text in the form that ``metric_table`` describes."""
    theme, head = "", ("", "", "", "")
    for line in filter(None, text.splitlines()):
        if line.startswith("= "):
            theme = line.removeprefix("= ")
        elif not line.startswith(" "):
            name, unit, healthy, when = (cell.strip() for cell in line.split("|"))
            head = name, unit, healthy, when
        else:
            name, unit, healthy, when = head
            yield MetricRow(name, theme, line.strip(), unit, healthy, when)


@cache
def metric_rows() -> tuple[MetricRow, ...]:
    """Return all rows, in the order of the table."""
    return tuple(read_table(TABLE))


@cache
def _matchers() -> list[tuple[re.Pattern[str], MetricRow]]:
    ranked = sorted(metric_rows(), key=lambda row: row.rank)
    return [(re.compile(row.pattern), row) for row in ranked]


def row_of(name: str) -> MetricRow | None:
    """Return the row of a metric that a run wrote; None if the table has none."""
    return next((row for pattern, row in _matchers() if pattern.fullmatch(name)), None)


@dataclass(frozen=True)
class NameElsewhere:
    """What another system calls a metric."""

    system: str
    there: str
    here: str


@cache
def names_elsewhere() -> dict[str, NameElsewhere]:
    """Return the names of metrics in other systems, by that name."""
    return {
        there: NameElsewhere(system.name, there, here)
        for system in metric_names.entries()
        for there, here in system.component.items()
    }


def elsewhere(row: MetricRow) -> list[NameElsewhere]:
    """Return what other systems call the metrics of a row."""
    return [name for name in names_elsewhere().values() if row_of(name.here) == row]


def describe(row: MetricRow) -> str:
    """Return what ``python -m openrl.cli.metrics`` prints on a row."""
    others = ", ".join(f"{name.system} {name.there}" for name in elsewhere(row))
    cells = {"unit": row.unit, "healthy": row.healthy, "there": row.when or "always"}
    cells["elsewhere"] = others
    lines = [f"  {name:9} {text}" for name, text in cells.items() if text]
    return "\n".join([f"{row.name}  ({row.theme})", f"  {row.formula}", *lines])
