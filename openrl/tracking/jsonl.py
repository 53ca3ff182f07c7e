"""metrics.jsonl: one JSON object per step, in a file that survives a resume."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from openrl.files import write_atomically

logger = logging.getLogger(__name__)


class JsonlTracker:
    """Writes one object per step, ``{"step": 3, "reward": 0.5, ...}``, flushed as soon as it is
    written.

    ``keep_until`` is the last step of an earlier run to keep. A run resumed at step k passes k; an
    atomic rewrite drops the lines after it, which will be written anew. -1 starts an empty file.
    """

    def __init__(self, path: Path, keep_until: int = -1) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = (
            [r for r in read_jsonl(path) if r["step"] <= keep_until]
            if path.exists() and keep_until >= 0
            else []
        )
        write_atomically(path, "".join(to_line(r) for r in kept))
        self.last_step: int | None = kept[-1]["step"] if kept else None
        # stays open as long as the run
        self._file = open(  # noqa: SIM115
            path, "a", buffering=1, encoding="utf-8", errors="backslashreplace"
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one step. Raises ValueError if the step does not rise, since two objects for one
        step would be ambiguous, and OSError with the file's name if it cannot be written."""
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"metrics of step {step} came after those of step {self.last_step}")
        try:
            self._file.write(to_line({"step": step, **values}))
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from error
        self.last_step = step

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file. A line torn by a crash is skipped, with a warning that names
    it."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                logger.warning("%s: line %d is not complete and was left out", path, number)


def to_line(record: Mapping[str, Any]) -> str:
    """Return one line of strict JSON. Values without a JSON form become text ("nan", "inf", which
    ``float()`` reads)."""
    return json.dumps(plain(record), ensure_ascii=False, allow_nan=False, default=str) + "\n"


def plain(value: Any) -> Any:
    """Return a value whose numbers strict JSON has; one that is not finite becomes text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value
