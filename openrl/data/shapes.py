"""Recognises rows of other systems by their columns, without --input_key and --label_key."""

from __future__ import annotations

from dataclasses import dataclass

from openrl.config.groups.data import PromptDataFlags
from openrl.data.privileged import Hints
from openrl.data.rows import MISSING, column, first_row, require_column
from openrl.extension_points import row_shapes
from openrl.lazy import datasets


@dataclass(frozen=True)
class Columns:
    """The columns of prompt, label and difficulty in the rows of one source."""

    input_key: str
    label_key: str | None
    note: str = ""  # how they were found, if no flag names them
    difficulty_key: str | None = None
    hints: Hints | None = None


def find_columns(flags: PromptDataFlags, rows: datasets.Dataset, source: str) -> Columns:
    """Return the columns of --input_key and --label_key or, if --input_key is left at its default
    and the rows lack that column, those of a known shape.

    Raises UserError, listing the keys that exist, if a column is missing.
    """
    first = first_row(rows) or {}
    if flags.input_key == PromptDataFlags.input_key and column(first, flags.input_key) is MISSING:
        for system, columns in known_shapes():
            if all(column(first, key) is not MISSING for key in columns):
                input_key, label_key = columns[0], flags.label_key or columns[1]
                require_column(rows, label_key, "label_key", source)
                note = f"rows look like {system}'s: prompt {input_key}, label {label_key}"
                return Columns(input_key, label_key, note)
    require_column(rows, flags.input_key, "input_key", source)
    if flags.label_key is not None:
        require_column(rows, flags.label_key, "label_key", source)
    return Columns(flags.input_key, flags.label_key)


def known_shapes() -> list[tuple[str, tuple[str, ...]]]:
    """Return the shapes of rows with their systems. Those that ask for more come first, so that
    rows made from another system's, which keep its columns, are taken for what they became."""
    shapes = [(e.name, columns) for e in row_shapes.entries() for columns in e.component]
    return sorted(shapes, key=lambda shape: -len(".".join(shape[1]).split(".")))


def binary_columns(rows: datasets.Dataset) -> list[str]:
    """Return the columns with images, sound or bytes at any depth, which JSON cannot hold."""

    def is_binary(feature: object) -> bool:
        if isinstance(feature, dict):
            return any(map(is_binary, feature.values()))
        inner = getattr(feature, "feature", None)
        return (
            isinstance(feature, datasets.Image | datasets.Audio | datasets.Video)
            or "binary" in str(getattr(feature, "dtype", ""))
            or (inner is not None and is_binary(inner))
        )

    return [name for name, feature in rows.features.items() if is_binary(feature)]
