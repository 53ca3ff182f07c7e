"""Reading columns from rows: nested keys, text, numbers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrl.config.groups.data import JINJA_SUFFIXES
from openrl.errors import BadRow, UserError
from openrl.files import expanded, read_text

if TYPE_CHECKING:
    from datasets import Dataset

MISSING = object()


def column(row: dict[str, Any], key: str) -> Any:
    """Return the value of ``key``, whose dots reach into nested columns, or else MISSING."""
    if key in row:
        return row[key]
    value: Any = row
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            return MISSING
        value = value[name]
    return value


def value_of(row: dict[str, Any], key: str) -> Any:
    """Return the value of ``key``, which must exist but may be None. Raises BadRow."""
    value = column(row, key)
    if value is MISSING:
        raise BadRow(f"no key {key!r}; it has {', '.join(_all_keys(row))}")
    return value


def first_row(rows: Dataset) -> dict[str, Any] | None:
    """Return the first row that can be read; None if none can, so that all are bad rows."""
    for number in range(len(rows)):
        with contextlib.suppress(UnicodeDecodeError, BadRow):
            return rows[number]
    return None


_ALPACA = {"instruction", "input", "output"}


def require_column(rows: Dataset, key: str, key_flag: str, source: str) -> None:
    """Raise UserError, listing the keys that exist, if the first row that can be read lacks
    ``key``."""
    first = first_row(rows)
    if first is not None and key == "input" and first.keys() >= _ALPACA:
        raise UserError(
            f"--{key_flag}: {source} has rows like Alpaca's, whose prompt is instruction and input"
            " together",
            f"--{key_flag} with a column that joins them, or instruction if input is always empty",
        )
    if first is not None and column(first, key) is MISSING:
        keys = ", ".join(_all_keys(first))
        raise UserError(
            f"--{key_flag}: {source} has no key {key!r}; it has {keys}",
            f"--{key_flag} with one of these" if key_flag.endswith("_key") else f"a column {key!r}",
        )


def _all_keys(row: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in row.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from _all_keys(value, f"{prefix}{name}.")


def as_text(value: Any) -> str:
    """Return the value, which must be non-empty text. Raises BadRow."""
    if isinstance(value, str) and value:
        return value
    raise BadRow(
        "empty" if value in (None, "", MISSING) else f"expected text, found {type(value).__name__}"
    )


def as_number(value: Any) -> float | None:
    """Return a finite number, also one that a CSV file holds as text; None if it is none."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def text_or_file(given: str, flag: str) -> str:
    """Return the content of the file of that name, or else the text. Raises UserError."""
    path = expanded(given)
    is_name = "\n" not in given and len(given) < 256
    if is_name and path.is_file():
        try:
            return read_text(given)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--{flag}: cannot read {given}: {error}") from error
    if is_name and path.suffix in (*JINJA_SUFFIXES, ".txt", ".md") and " " not in given:
        raise UserError(
            f"--{flag}: no such file: {given}", f"a path from {Path.cwd()}, or the text itself"
        )
    return given
