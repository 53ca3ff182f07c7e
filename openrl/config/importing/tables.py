"""What openrl knows of the configuration of another system: a table with a row for each key.

A table is a file of tab-separated columns, which the importer, ``--explain`` and the documentation
read:

    key       as written there, parts separated by dots; * stands for one part, ** for any rest
    verdict   one of VERDICTS
    flags     what to give here; a|b means the first that the command has; empty: nothing to give
    how       empty: the value as it is; "true=3; false=2; *=*": a value for each, - for none;
              "together": by flags.tsv, from several keys; "refuse": nothing starts with such a key
    default   the value there, if a file does not give the key
    commands  names of the commands that the row is for; empty: all
    files     how many of that system's own examples have the key
    seen      values in them
    note      one sentence for whoever comes from there
    changed   the default and since which version it holds, where earlier ones had another
"""

from __future__ import annotations

import csv
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from openrl.extension_points import config_tables

VERDICTS = {
    "same": "as there",
    "converted": "converted",
    "differs": "differs in meaning",
    "none": "no counterpart",
    "dead": "ignored there too",
}
TOGETHER, REFUSE, LEFT_OUT = "together", "refuse", "-"


@dataclass(frozen=True)
class ConfigTable:
    """How the configuration of a system is read."""

    path: Path  # of the table
    # what tells the command: a word of a command line, a called class, or how keys begin; with
    # "" nothing here does that
    marks: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)  # such a mark -> what to do instead
    # a mark -> keys that it stands for, unless they are given
    implied: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    together: str = ""  # "module:function" of rows that say ``together``: see ``Together``
    as_flags: bool = False  # its keys are given as --key value, so our commands take them too
    # of calls in Python: class -> how its arguments' keys begin here
    calls: Mapping[str, str] = field(default_factory=dict)
    # arguments of what starts its programs (torchrun, accelerate launch) -> the key that they are
    launcher: Mapping[str, str] = field(default_factory=dict)
    # first part of keys that are others under another name -> first part of those
    renamed: Mapping[str, str] = field(default_factory=dict)
    negation: str = ""  # with "no_", --no_x of a command line says that x is false


@dataclass(frozen=True)
class KeyRow:
    """A row of a table."""

    key: str
    verdict: str
    flags: tuple[str, ...]
    how: str
    default: str
    commands: tuple[str, ...]
    files: int
    seen: tuple[str, ...]
    note: str
    changed: str = ""

    def applies(self, command: str) -> bool:
        return not self.commands or command in self.commands

    @property
    def default_raw(self) -> Any:
        """The default there as YAML would hold it; None if there is none."""
        if self.default in ("", "null"):
            return None
        listed = self.default.startswith("[")
        return re.findall(r"[^\s,\[\]]+", self.default) if listed else self.default

    def converted(self, raw: Any) -> Any:
        """Return the value to give for ``raw``, or LEFT_OUT."""
        return raw if self.how in (TOGETHER, REFUSE) else choose(self.how, raw)


def choose(how: str, raw: Any) -> Any:
    """Return what a cell such as "true=3; *=*" has for ``raw``, which an empty one keeps."""
    choices = dict(part.strip().split("=", 1) for part in how.split(";") if part)
    value = choices.get(plain(raw), choices.get("*", "*"))
    return raw if value == "*" else value


def plain(raw: Any) -> str:
    """Return a scalar as tables write it: true, false, null, or its text."""
    if raw is None:
        return "null"
    text = str(raw)
    lower = text.lower()
    if lower in ("none", "null", "~"):
        return "null"
    return {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(
        lower, lower if lower in ("true", "false") else text
    )


class Keys:
    """The rows of a system's table by their keys."""

    def __init__(self, rows: list[KeyRow]) -> None:
        self.rows = rows
        self._exact = {row.key: row for row in rows}
        self._patterns = [(_pattern(row.key), row) for row in rows if "*" in row.key]

    def row(self, key: str) -> KeyRow | None:
        """Return the row of a key, whose parts may match those of a pattern."""
        if key in self._exact:
            return self._exact[key]
        return next((row for pattern, row in self._patterns if pattern.fullmatch(key)), None)

    def ends_at(self, key: str) -> bool:
        """Whether a mapping under this key is one value, not more keys."""
        row = self._exact.get(key)
        return row is not None and not any(k.startswith(f"{key}.") for k in self._exact)

    def nearest(self, key: str, given: Container[str] = ()) -> str:
        """Return the known key most like an unknown one and not ``given``, or an empty text."""
        home, _, last = key.rpartition(".")
        beside: dict[str, str] = {}
        free = [known for known in self._exact if known not in given]
        for known in free:
            parent, _, end = known.rpartition(".")
            if end == last or parent == home:
                beside[end] = known
        ends = get_close_matches(last, beside, 1, 0.75)
        close = [beside[end] for end in ends] or get_close_matches(key, free, 1, 0.85)
        return close[0] if close else ""


def _pattern(key: str) -> re.Pattern[str]:
    parts = {"**": r".+", "*": r"[^.]+"}
    return re.compile(r"\.".join(parts.get(part, re.escape(part)) for part in key.split(".")))


@cache
def keys_of(system: str) -> Keys:
    """Return the table of a system."""
    return Keys([_row(line) for line in table_lines(config_tables[system].component.path)])


def table_lines(path: Path) -> list[dict[str, str]]:
    """Return the lines of a table, each by the names of its columns."""
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE, restval=""))


def _row(line: dict[str, str]) -> KeyRow:
    return KeyRow(
        line["key"],
        line["verdict"],
        tuple(line["flags"].split()),
        line["how"],
        line["default"],
        tuple(line["commands"].split()),
        int(line["files"] or 0),
        tuple(filter(None, line["seen"].split(" | "))),
        line["note"],
        line.get("changed", ""),
    )
