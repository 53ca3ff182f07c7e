"""Rows from files, saved datasets or the Hugging Face Hub.

Rows never live in memory as a whole. A file or a dataset of the Hub is converted once into an Arrow
file on disk and then read row by row through a memory map. If --max_samples asks for few rows (up
to ``row_files.STREAMED``), even that is skipped: the source is opened as a stream and read, or
downloaded, little further than the last row wanted (10 MB of JSON, a row group of parquet). Only
what training draws from stays in memory: the token ids, label and small columns of each row.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import (
    Dataset,
    ReadInstruction,
    disable_progress_bars,
    get_dataset_config_names,
    get_dataset_split_names,
    load_dataset_builder,
    load_from_disk,
)
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.json.json import Json

from openrl.config.groups.data import FILE_FORMATS, data_items, name_and_subset
from openrl.data.row_files import load_file, load_files, load_rows_of
from openrl.errors import UserError

disable_progress_bars()  # its progress bars would disturb ours

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class RowSource:
    """The rows of one item of a comma list."""

    name: str  # as the user gave it, for messages
    tag: str  # the source of rows that do not name one themselves
    rows: Dataset


def load_sources(
    names: str, split: str, max_samples: int | None, *, flag: str, mixed: bool = False
) -> list[RowSource]:
    """Return the rows of each item of a comma list, at most ``max_samples`` in all; None takes all.

    With ``mixed``, items will be drawn by probabilities, so any of them may fill the blend:
    ``max_samples`` then limits each item. A single item has the tag "default"; of several, each is
    tagged with its file or dataset name without directories. Raises UserError.
    """
    items = data_items(names)
    sources: list[RowSource] = []
    left = max_samples
    for item, tag in zip(items, _tags(items), strict=True):
        sources.append(RowSource(item, tag, load_rows(item, split, left, flag=flag)))
        if left is not None and not mixed:
            left -= len(sources[-1].rows)
            if not left:
                break
    return sources


def _tags(items: list[str]) -> list[str]:
    if len(items) == 1:
        return ["default"]
    short = []
    for item in items:
        name, subset = name_and_subset(item)
        path = Path(name)
        stem = path.stem if path.suffix in FILE_FORMATS else path.name
        short.append(f"{stem}@{subset}" if subset else stem)
    return short if len(set(short)) == len(short) else items


def load_rows(source: str, split: str, max_samples: int | None, *, flag: str) -> Dataset:
    """Return the first ``max_samples`` rows of one source; None takes all.

    ``source`` is a file with a suffix in ``FILE_FORMATS``, a directory written by ``save_to_disk``,
    a directory of such files, or a Hub name. NAME@SUBSET takes the split of that name, or else the
    configuration, or else the data directory. ``split`` chooses among the splits of sources that
    have them; its slice, as in train[:50], is taken from any source. ``flag`` names the flag that
    gave ``source``. Raises UserError if the source is unreadable or empty, or has no such split.
    """
    name, subset = name_and_subset(source)
    path = Path(name).expanduser()
    split, sliced, part = split.partition("[")
    most = None if sliced else max_samples  # a slice may lie anywhere
    if path.is_file():
        if subset not in (None, "train"):
            raise UserError(f"--{flag}: {name} is a single file, without a subset {subset!r}", name)
        rows = load_file(path, most, flag)
    elif path.is_dir() and any((path / f).exists() for f in ("state.json", "dataset_dict.json")):
        rows = _load_saved(path, subset or split, name, flag)
    elif path.is_dir() or _may_be_hub_name(name):
        rows = _load_named(name, split, subset, most, flag)
    else:
        kind = "not a file or directory" if path.exists() else "no such file or directory"
        raise UserError(f"--{flag}: {kind}: {name}", f"a Hub name, or a path from {Path.cwd()}")
    if sliced:
        rows = _slice(rows, f"[{part}", flag)
    if max_samples is not None:
        rows = rows.select(range(min(len(rows), max_samples)))
    if not len(rows):
        raise UserError(f"--{flag}: {source} has no rows")
    return rows


def _load_saved(path: Path, split: str, source: str, flag: str) -> Dataset:
    """Load what ``save_to_disk`` wrote."""
    try:
        loaded = load_from_disk(path)
    except IndexError as error:  # raised if there are no rows
        raise UserError(f"--{flag}: {path} has no rows") from error
    except (OSError, ValueError) as error:
        raise UserError(f"--{flag}: cannot read {path}: {error}") from error
    if isinstance(loaded, Dataset):
        return loaded
    if split not in loaded:
        raise UserError(f"--{flag}: {source} has no split {split!r}; it has {', '.join(loaded)}")
    return loaded[split]


def _slice(rows: Dataset, part: str, flag: str) -> Dataset:
    """Return the rows of a slice as ``datasets`` writes it: [:50], [10%:20%]."""
    try:
        (found,) = ReadInstruction.from_spec(f"rows{part}").to_absolute({"rows": len(rows)})
    except (ValueError, KeyError, AssertionError) as error:
        message = f"--{flag}: the slice {part} of its split cannot be read"
        raise UserError(message, "train[:50] or train[10%:]") from error
    return rows.select(list(range(found.from_, found.to)))  # an empty range it would refuse


def _may_be_hub_name(source: str) -> bool:
    """Return whether the Hub is asked: for a mistyped path that would take long and mislead."""
    return (
        bool(_HUB_NAME.fullmatch(source))
        and not source.startswith(".")
        and Path(source).suffix not in FILE_FORMATS
    )


def _load_named(
    name: str, split: str, subset: str | None, max_samples: int | None, flag: str
) -> Dataset:
    """Load a directory of data files or a dataset of the Hub."""
    try:
        arguments = _load_arguments(name, split, subset)
        if (exact := _load_exactly(name, max_samples, **arguments)) is not None:
            return exact
        return load_rows_of(name, max_samples=max_samples, **arguments)
    except (ValueError, csv.Error) as error:  # an unknown split; the message lists the known ones
        raise UserError(f"--{flag}: {name}: {error}") from error
    except (DatasetNotFoundError, FileNotFoundError, DatasetGenerationError) as error:
        raise UserError(f"--{flag}: cannot load {name}: {error.__cause__ or error}") from error
    except ConnectionError as error:
        raise UserError(
            f"--{flag}: {name} is neither a local path nor in the cache, and the Hub cannot be"
            f" reached: {error}"
        ) from error


def _load_exactly(
    source: str, max_samples: int | None, split: str, **arguments: str
) -> Dataset | None:
    """Load a dataset that consists of JSON or CSV files, with the values that the files have; None
    for any other. ``datasets`` knows which files belong to which split. Raises ValueError."""
    builder = load_dataset_builder(source, **arguments)
    config: Any = builder.config
    if isinstance(builder, Json) and config.field is None:
        kind, separator = "json", ","
    elif isinstance(builder, Csv) and config.names is None and config.header == "infer":
        kind, separator = "csv", config.sep
    else:
        return None
    files = config.data_files or {}
    wanted = split.split("+")
    if unknown := [part for part in wanted if part not in files]:
        raise ValueError(f'Unknown split "{unknown[0]}". Should be one of {sorted(files)}.')
    return load_files(
        [file for part in wanted for file in files[part]], kind, max_samples, separator
    )


def _load_arguments(name: str, split: str, subset: str | None) -> dict[str, str]:
    """Translate SUBSET for ``load_dataset``: a split, a configuration, or else a data directory."""
    if subset is None:
        return {"split": split}
    configurations = get_dataset_config_names(name)
    if subset in get_dataset_split_names(name, configurations[0]):
        return {"split": subset}
    return {"name" if subset in configurations else "data_dir": subset, "split": split}
