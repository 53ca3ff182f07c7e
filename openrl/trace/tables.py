"""The columns of the trace on disk: parquet, compressed by zstd. The home of pyarrow."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from openrl.errors import UserError
from openrl.files import write_atomically

Rows = list[dict[str, Any]]

_IDS, _FLOATS, _FLAGS = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.bool_())
_NUMBERS = pa.map_(pa.string(), pa.float64())

_VERSION = pa.struct({"start": pa.int32(), "end": pa.int32(), "version": pa.int32()})
_IMAGE = pa.struct(
    {"sha256": pa.string(), "start": pa.int32(), "end": pa.int32(), "placeholder": _IDS}
)
_SEGMENT = pa.struct(
    {
        "token_ids": _IDS,
        "loss_mask": _FLAGS,
        "rollout_logprobs": _FLOATS,
        "versions": pa.list_(_VERSION),
        "state": pa.string(),
        "images": pa.list_(_IMAGE),
        "kept": pa.struct({"sizes": _IDS, "ids": _IDS, "logprobs": _FLOATS}),
        "privileged": pa.struct(
            {"length": pa.int32(), "token_ids": _IDS, "images": pa.list_(_IMAGE)}
        ),
    }
)
_SCORE = pa.struct(
    {
        "reward": pa.float64(),
        "passed": pa.float64(),
        "parts": _NUMBERS,
        "token_rewards": pa.list_(pa.float64()),
        "attempts": pa.int32(),
        "failure": pa.string(),
        "seconds": pa.float64(),
        "feedback": pa.string(),
    }
)
_TOOL_USE = pa.struct(
    {"turn": pa.int32(), "name": pa.string(), "seconds": pa.float64(), "failed": pa.bool_()}
)
_MESSAGE = pa.struct({"role": pa.string(), "text": pa.string(), "images": pa.list_(pa.string())})
_TURN = pa.struct(
    {
        "messages": pa.list_(_MESSAGE),  # new in this turn, with hashes of their images
        "frame": pa.string(),  # hash of the picture that the environment drew, or null
        "action": pa.string(),
        "reward": pa.float64(),
    }
)
PLAYED = pa.schema(
    {
        "number": pa.int32(),
        "group": pa.int32(),
        "member": pa.int32(),  # place among the siblings
        "role": pa.string(),  # answer, greedy or failed
        "tag": pa.string(),  # train, filtered, replayed or evaluation
        "prompt_id": pa.string(),
        "source": pa.string(),
        "prompt": pa.string(),
        "label": pa.string(),  # JSON
        "meta": pa.string(),  # JSON of the row's other columns
        "made": pa.string(),  # JSON of what an environment made of the prompt's seed, or null
        "segments": pa.list_(_SEGMENT),
        "end": pa.string(),
        "text": pa.string(),
        "turns": pa.int32(),
        "score": _SCORE,
        "metrics": _NUMBERS,
        "replays": pa.int32(),
        "failure": pa.string(),
        "fault": pa.string(),
        "agent": pa.string(),
        "seed": pa.int64(),
        "engine": pa.int32(),
        "sampling_seed": pa.int64(),
        "seconds": pa.float64(),
        "tool_uses": pa.list_(_TOOL_USE),
        "rendered": pa.list_(_TURN),  # empty unless the prompt asked for it
    }
)
"""One trajectory as it was played."""

_UPDATE = pa.struct(
    {
        "optimizer_step": pa.int32(),  # 1 is the first of the training step
        "logprobs": _FLOATS,
        "entropies": _FLOATS,
        "losses": _FLOATS,
        "weights": _FLOATS,
        "clipped": _FLOATS,
    }
)
LEARNED = pa.schema(
    {
        "number": pa.int32(),
        "segment": pa.int32(),
        "shaped": pa.float64(),
        "estimate": pa.float64(),
        "loss_weight": pa.float64(),
        "trained": _FLAGS,
        "ages": _IDS,
        "advantages": _FLOATS,
        "returns": _FLOATS,
        "values": _FLOATS,
        "old_logprobs": _FLOATS,
        "ref_logprobs": _FLOATS,
        "weights": _FLOATS,
        "updates": pa.list_(_UPDATE),
    }
)
"""What training found out about one segment. A list that was not computed is null."""


_AT_ONCE = 256  # rows that are read together when one of them is wanted
_OWN_TEXTS = ("text", "failure")  # every row has another, so a dictionary of them is no use


def write_table(path: Path, rows: Rows, schema: pa.Schema) -> int:
    """Write rows as a file of columns, whole or not at all. Returns its bytes."""
    buffer = io.BytesIO()
    table = pa.Table.from_pylist(rows, schema=schema)
    texts = [f.name for f in schema if f.type == pa.string() and f.name not in _OWN_TEXTS]
    pq.write_table(table, buffer, compression="zstd", use_dictionary=texts, row_group_size=_AT_ONCE)
    write_atomically(path, buffer.getvalue())
    return buffer.tell()


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Raises UserError if the file is damaged."""
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        message = f"{path} cannot be read: {error}"
        raise UserError(message, "another step, or a copy of the file") from error


def read_table(path: Path, columns: list[str] | None = None) -> Rows:
    """Return the rows of a file, of all columns or of those that are named. Raises UserError if it
    is damaged."""
    with _opened(path) as file:
        table = file.read(columns=columns)
    return [_with_dicts(row) for row in table.to_pylist()]


def read_where(path: Path, number: int) -> Rows:
    """Return the rows of a file about trajectory ``number``, without reading all others. Raises
    UserError if it is damaged."""
    with _opened(path) as file:
        return _where(file, number)


def _where(file: pq.ParquetFile, number: int) -> Rows:
    numbers = file.read(columns=["number"])["number"].to_numpy()
    places = (numbers == number).nonzero()[0]
    found: Rows = []
    for part in sorted({int(place) // _AT_ONCE for place in places}):
        table = file.read_row_group(part)
        here = [int(p) - part * _AT_ONCE for p in places if p // _AT_ONCE == part]
        found += [_with_dicts(row) for row in table.take(here).to_pylist()]
    return found


def _with_dicts(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with its maps, which arrive as lists of pairs, as dicts."""
    if row.get("metrics") is not None:
        row["metrics"] = dict(row["metrics"])
    if row.get("score") is not None:
        row["score"]["parts"] = dict(row["score"]["parts"])
    return row
