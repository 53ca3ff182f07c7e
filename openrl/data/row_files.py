"""Files of rows, whose values stay as the file has them: no type is inferred from text.

The lines of a JSON file are kept as text in an Arrow file and parsed when a row is read, so numbers
of any size, labels of several kinds and keys that only some rows have come through unchanged. The
cells of a CSV file are text."""

from __future__ import annotations

import codecs
import csv
import glob
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import (
    Dataset,
    DownloadManager,
    Features,
    Value,
    concatenate_datasets,
    load_dataset,
)
from datasets.exceptions import DatasetGenerationError

from openrl.config.groups.data import FILE_FORMATS
from openrl.errors import BadRow, UserError
from openrl.files import is_lfs_pointer

STREAMED = 20_000  # rows; more than this are worth a file on disk, which the next run finds again
LINE = "text"  # the column that holds the lines of a JSON file


def load_file(path: Path, max_samples: int | None, flag: str) -> Dataset:
    """Return the rows of a file, at most about ``max_samples``. ``flag`` is the flag that named it.
    Raises UserError for a file that cannot be read; lines that are not JSON make bad rows."""
    if path.suffix not in FILE_FORMATS:
        scripts = "; dataset scripts are not supported" if path.suffix == ".py" else ""
        raise UserError(
            f"--{flag}: cannot read {path}{scripts}", f"a file ending in {', '.join(FILE_FORMATS)}"
        )
    if not path.stat().st_size:
        raise UserError(f"--{flag}: {path} is empty")
    if reason := _wrong_start(path):
        raise UserError(f"--{flag}: cannot read {path}: {reason}")
    try:
        return _read(path, max_samples)
    except RecursionError:
        raise UserError(f"--{flag}: {path} has values that are nested too deeply") from None
    except (DatasetGenerationError, ValueError, csv.Error) as error:
        if "corresponds to no data" in str(error):
            raise UserError(f"--{flag}: {path} has no rows") from error
        reason = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"--{flag}: cannot read {path}: {reason}") from error


def load_rows_of(*args: Any, max_samples: int | None, **kwargs: Any) -> Dataset:
    """Call ``load_dataset``; if ``max_samples`` is small, read no further than that."""
    if max_samples is None or max_samples > STREAMED:
        return load_dataset(*args, **kwargs)
    stream = load_dataset(*args, streaming=True, **kwargs)
    rows = list(stream.take(max_samples))
    return Dataset.from_list(rows, features=stream.features, on_mixed_types="use_json")


def _wrong_start(path: Path) -> str:
    """Say what the first bytes show: UTF-16, zeros, or a pointer in the place of the data. Empty if
    they are text."""
    if is_lfs_pointer(path):
        return "it is only a pointer of Git LFS; run git lfs pull"
    with open(path, "rb") as file:
        start = file.read(2)
    if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "it is UTF-16; save it as UTF-8"
    return "it is not text" if start == b"\0\0" else ""


def _read(path: Path, max_samples: int | None) -> Dataset:
    kind = FILE_FORMATS[path.suffix]
    if kind == "json":
        return rows_of_lines(_lines(str(path), max_samples))
    if kind == "csv":
        return _cells(path, max_samples)
    files = glob.escape(str(path))
    return load_rows_of(kind, data_files=files, split="train", max_samples=max_samples)


def load_files(
    files: Sequence[str], kind: str, max_samples: int | None, separator: str = ","
) -> Dataset:
    """Return the rows of JSON or CSV files, also of the Hub, one file after the other. They may
    have different columns. Raises ValueError, and csv.Error for a file that is no CSV."""
    parts: list[Dataset] = []
    left = max_samples
    for file in files:
        if kind == "json":
            parts.append(_lines(file, left))
        else:
            parts.append(_cells(Path(_local(file)), left, separator))
        left = None if left is None else left - len(parts[-1])
        if left is not None and left <= 0:
            break
    whole = concatenate_datasets(parts)
    return rows_of_lines(whole) if kind == "json" else whole


def _local(file: str) -> str:
    """Return the path of a file, downloaded and unpacked if need be."""
    return str(DownloadManager().download_and_extract(file))


def _cells(path: Path, max_samples: int | None, separator: str = ",") -> Dataset:
    """Return the rows of a CSV file, whose cells are text."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        names = next(csv.reader(file, delimiter=separator), [])
    return load_rows_of(
        "csv",
        data_files=glob.escape(str(path)),
        split="train",
        max_samples=max_samples,
        features=Features(dict.fromkeys(names, Value("string"))),
        na_filter=False,
        sep=separator,
    )


def _lines(file: str, max_samples: int | None) -> Dataset:
    """Return the rows of a JSON file as text, in the column ``LINE``."""
    if not file.partition(".jsonl")[1] and (rows := _one_value(Path(_local(file)))) is not None:
        return rows
    return load_rows_of(
        "text",
        data_files=file if "://" in file else glob.escape(file),
        split="train",
        max_samples=max_samples,
        # bytes that are not UTF-8 become escapes that JSON lacks, which make a bad row
        encoding="utf-8-sig",
        encoding_errors="backslashreplace",
    )


def _one_value(path: Path) -> Dataset | None:
    """Return the rows, as lines, of a JSON file that is one value, a list of rows or an object of
    columns; None if every line is a row."""
    text = path.read_text("utf-8-sig", errors="backslashreplace")
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return None
    if isinstance(value, dict) and value and all(isinstance(v, list) for v in value.values()):
        value = [
            dict(zip(value, cells, strict=True)) for cells in zip(*value.values(), strict=True)
        ]
    rows = value if isinstance(value, list) else [value]
    return Dataset.from_dict({LINE: [json.dumps(row) for row in rows]})


def rows_of_lines(lines: Dataset) -> Dataset:
    """Return the rows that the lines hold, without empty lines."""
    if not len(lines):
        return lines
    held = [number for number, line in enumerate(lines[LINE]) if line.strip()]
    if len(held) < len(lines):
        lines = lines.select(held)
    return lines.with_transform(_parse_lines)


def _parse_lines(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
    """Parse lines into columns; a key that a row lacks is None. Raises BadRow."""
    rows = [_parse_line(line) for line in batch[LINE]]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _parse_line(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        if "\\x" in line:
            raise BadRow("text that is not UTF-8") from error
        raise BadRow(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise BadRow("values that are nested too deeply") from error
    if not isinstance(row, dict):
        raise BadRow("not a JSON object")
    if "\\ud" in line.lower() and not _is_writable(row):
        raise BadRow("half a surrogate pair, which is no text")
    return row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise BadRow(f"the key {next(n for n in names if names.count(n) > 1)!r} stands twice")
    return found


def _is_writable(row: dict[str, Any]) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
