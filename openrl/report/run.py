"""What a report reads of a run's directory: metrics, flags, summary, trace. What is missing is
said, together with how to get it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from openrl.errors import UserError
from openrl.trace.index import NAME as INDEX
from openrl.trace.reader import Trace
from openrl.tracking.jsonl import read_jsonl

MOST_POINTS = 10_000  # of a curve
QUIET_MINUTES = 10  # without a line of metrics, after which a run may have died

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A run as far as its directory tells. ``notes`` are sentences about what is missing."""

    directory: Path
    metrics: Sequence[Record]  # one per step, in order
    flags: Mapping[str, Any]
    summary: Mapping[str, Any] | None  # None: the run has not ended, or died
    trace: Trace | None
    notes: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def ended(self) -> bool:
        """Whether summary.json is that of the last step; an earlier part of a resumed run leaves an
        older one."""
        return self.summary is not None and self.summary.get("steps", 0) >= self.last_step

    def state(self) -> str:
        """Return in words whether the run goes on."""
        if self.ended:
            return f"ended after step {self.last_step}"
        path = self.directory / "metrics.jsonl"
        minutes = (time.time() - path.stat().st_mtime) / 60 if path.is_file() else 0.0
        if minutes > QUIET_MINUTES:
            return (
                f"at step {self.last_step}, without an end: nothing was written for"
                f" {minutes:.0f} minutes, so it may have died"
            )
        return f"runs, at step {self.last_step}"


def read_run(directory: Path) -> Run:
    """Read a run, or the trace of an evaluation. Raises UserError if the directory is none, or not
    that of either."""
    if not directory.is_dir():
        raise UserError(f"no such directory: {directory}", "the --save_path of a run")
    metrics, config = directory / "metrics.jsonl", directory / "config.yaml"
    files = (metrics, config, directory / INDEX)  # the last is that of a trace alone
    if not any(path.is_file() for path in files):
        raise UserError(f"{directory} is not the directory of a run", "the --save_path of a run")
    notes: list[str] = []
    records = [*read_jsonl(metrics)] if metrics.is_file() else []
    records = [r for r in records if isinstance(r, dict) and isinstance(r.get("step"), int)]
    if not records:
        notes.append(
            "There are no metrics: metrics.jsonl gets its first line at the end of step 1."
        )
    trace = _trace(directory, notes)
    return Run(directory, records, _flags(config, notes), _summary(directory, notes), trace, notes)


def _trace(directory: Path, notes: list[str]) -> Trace | None:
    try:
        return Trace(directory)
    except UserError as error:
        notes.append(f"There are no trajectories to look at: {error}")
        return None


def _flags(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the effective flags, with those of every section beside each other."""
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        notes.append("There are no flags to compare: config.yaml is missing or cannot be read.")
        return {}
    return read if isinstance(read, dict) else {}


def _summary(directory: Path, notes: list[str]) -> dict[str, Any] | None:
    """Return what a run writes at its end; None while it goes on."""
    path = directory / "summary.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"summary.json cannot be read: {error}")
        return None
    return found if isinstance(found, dict) else None


def curves(records: Sequence[Record]) -> dict[str, list[list[float]]]:
    """Return two lists for each metric: steps and values. A value that is not finite is left out;
    of more than MOST_POINTS records every k-th is taken, and each that has an evaluation."""
    stride = math.ceil(len(records) / MOST_POINTS) or 1
    found: dict[str, list[list[float]]] = {}
    for place, record in enumerate(records):
        for name, value in record.items():
            rare = name.startswith(("eval/", "val-core/"))
            if name == "step" or (place % stride and not rare):
                continue
            if (number := finite(value)) is not None:
                steps, values = found.setdefault(name, [[], []])
                steps.append(record["step"])
                values.append(number)
    return found


def finite(value: Any) -> float | None:
    """Return a number with six digits; None for what is no finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return float(f"{number:.6g}") if math.isfinite(number) else None


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the flags that differ between runs, each with its value in every run."""
    names = sorted({name for run in runs for name in run.flags})
    shown = ((name, [_shown(run.flags, name) for run in runs]) for name in names)
    return [(name, values) for name, values in shown if len(set(values)) > 1]


def _shown(flags: Mapping[str, Any], name: str) -> str:
    value = flags.get(name, "not known to this run")
    return value if isinstance(value, str) else json.dumps(value, default=str)
