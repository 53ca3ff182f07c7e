"""Rows from files, saved datasets or the Hugging Face Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from openrl.errors import UserError

FILE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load_rows(source: str, split: str, max_samples: int | None, *, flag: str) -> Dataset:
    """The first ``max_samples`` rows of ``source``; None takes all.

    ``source`` is a file by the suffixes of ``FILE_FORMATS``, a directory that ``save_to_disk`` wrote, a directory of such
    files, or a Hub name. ``split`` chooses among the splits of sources that have them. ``flag`` is the name of the flag
    that ``source`` came from. Raises UserError if the source is missing, unreadable or empty, or has no such split.
    """
    path = Path(source).expanduser()
    if path.is_file():
        rows = _load_file(path, flag)
    elif path.is_dir() and any((path / f).exists() for f in ("state.json", "dataset_dict.json")):
        rows = _choose_split(_load_saved(path, flag), split, source, flag)
    elif path.is_dir() or _may_be_hub_name(source):
        rows = _load_named(source, split, flag)
    else:
        raise UserError(f"--{flag}: there is no file or directory {source}", f"a Hub name, or a path from {Path.cwd()}")
    if max_samples is not None:
        rows = rows.select(range(min(len(rows), max_samples)))
    if not len(rows):
        raise UserError(f"--{flag}: {source} has no rows")
    return rows


def _load_file(path: Path, flag: str) -> Dataset:
    if path.suffix not in FILE_FORMATS:
        raise UserError(f"--{flag}: cannot read {path}", f"a file ending in {', '.join(FILE_FORMATS)}")
    if not path.stat().st_size:
        raise UserError(f"--{flag}: {path} is empty")
    try:
        return load_dataset(FILE_FORMATS[path.suffix], data_files=str(path), split="train")
    except (DatasetGenerationError, ValueError) as error:
        if "corresponds to no data" in str(error):
            raise UserError(f"--{flag}: {path} has no rows") from error
        reason = _bad_lines(path) if path.suffix == ".jsonl" else ""
        raise UserError(f"--{flag}: cannot read {path}: {reason or error.__cause__ or error}") from error


def _bad_lines(path: Path, show: int = 5) -> str:
    """Names the first lines of a JSONL file that are not JSON objects; empty if all are."""

    def reasons() -> Iterator[str]:
        with open(path, encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                try:
                    if line.strip() and not isinstance(json.loads(line), dict):
                        yield f"line {number}: not an object"
                except json.JSONDecodeError as error:
                    yield f"line {number}: {error.msg} at column {error.colno}"

    return "; ".join(islice(reasons(), show))


def _load_saved(path: Path, flag: str) -> Dataset | DatasetDict:
    """What ``save_to_disk`` wrote."""
    try:
        return load_from_disk(path)
    except IndexError as error:  # so it ends where there are no rows
        raise UserError(f"--{flag}: {path} has no rows") from error
    except (OSError, ValueError) as error:
        raise UserError(f"--{flag}: cannot read {path}: {error}") from error


def _choose_split(loaded: Dataset | DatasetDict, split: str, source: str, flag: str) -> Dataset:
    if isinstance(loaded, Dataset):
        return loaded
    if split not in loaded:
        raise UserError(f"--{flag}: {source} has no split {split!r}; it has {', '.join(loaded)}")
    return loaded[split]


def _may_be_hub_name(source: str) -> bool:
    """Not a path that somebody mistyped: asking the Hub for it would take long and mislead."""
    return bool(_HUB_NAME.fullmatch(source)) and not source.startswith(".") and Path(source).suffix not in FILE_FORMATS


def _load_named(source: str, split: str, flag: str) -> Dataset:
    """A directory of data files, or a dataset of the Hub."""
    try:
        return load_dataset(source, split=split)
    except ValueError as error:  # an unknown split: the message lists the known ones
        raise UserError(f"--{flag}: {source}: {error}") from error
    except (DatasetNotFoundError, FileNotFoundError, DatasetGenerationError) as error:
        raise UserError(f"--{flag}: cannot load {source}: {error.__cause__ or error}") from error
    except ConnectionError as error:
        raise UserError(f"--{flag}: {source} is not here, and the Hub cannot be reached: {error}") from error
