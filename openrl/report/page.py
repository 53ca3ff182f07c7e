"""One HTML file that shows a run, or several side by side, without a network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from openrl.config.groups.health import HealthFlags
from openrl.files import write_atomically
from openrl.flags.values import NONE
from openrl.report.rollouts import RolloutTable, read_rollouts
from openrl.report.run import MOST_POINTS, Run, curves, differences, read_run
from openrl.report.verdicts import learning, time_by_stage
from openrl.tracking.health import find_alarms
from openrl.tracking.metric_rows import metric_rows, names_elsewhere, row_of

NAME = "report.html"
SCRIPTS = ("uPlot.iife.min.js", "report.js")
STYLES = ("uPlot.min.css", "report.css")


def write_report(directories: Sequence[Path], path: Path) -> None:
    """Write the report on the runs in these directories. Raises UserError if one of them is no
    run."""
    write_atomically(path, build_page([read_run(directory) for directory in directories]))


def build_page(runs: Sequence[Run], served: bool = False) -> str:
    """Return the page. ``served``: it asks its server for what changes and what it lacks."""
    rollouts = [None if run.trace is None else read_rollouts(run.trace) for run in runs]
    blocks = dict(_blocks(runs, rollouts, served))
    scripts = [_asset(name) for name in SCRIPTS]
    slots = {
        "title": html.escape(", ".join(_names(runs))),
        "policy": " ".join(f"'sha256-{_digest(script)}'" for script in scripts),
        "licence": _asset("uPlot.LICENSE"),
        "styles": "\n".join(map(_asset, STYLES)),
        "data": "\n".join(data_block(name, value) for name, value in blocks.items()),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: slots[slot[1]], _asset("report.html"))


def _asset(name: str) -> str:
    return (files("openrl.report") / "assets" / name).read_text(encoding="ascii")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def data_block(name: str, value: Any) -> str:
    """Return data that a script reads and nothing runs, whatever a model wrote into it."""
    return f'<script type="application/json" id="{name}">{escaped(value)}</script>'


def escaped(value: Any) -> str:
    """Return JSON in ASCII that no HTML parser takes for anything else."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _blocks(
    runs: Sequence[Run], rollouts: Sequence[RolloutTable | None], served: bool
) -> Iterator[tuple[str, Any]]:
    """Yield the page's data: what the first screen needs, then each run's trajectories, of which
    a script reads those that are looked at."""
    drawn = [_own(curves(run.metrics)) for run in runs]
    names = sorted({name for found in drawn for name in found})
    yield (
        "overview",
        {
            "made": time.strftime("%Y-%m-%d %H:%M:%S"),
            "served": served,
            "metrics": explained(names),
            "differences": differences(runs),
            "runs": [
                _overview(name, run, found, of_run)
                for name, run, found, of_run in zip(
                    _names(runs), runs, drawn, rollouts, strict=True
                )
            ],
        },
    )
    for number, of_run in enumerate(rollouts):
        if of_run is None:
            continue
        yield f"table-{number}", of_run.table
        yield f"pieces-{number}", of_run.pieces
        yield f"images-{number}", of_run.images
        for step, by_number in of_run.full.items():
            yield f"full-{number}-{step}", by_number


def _own(drawn: dict[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    """Return the curves without those that repeat another under another system's name."""
    others = names_elsewhere()
    return {n: c for n, c in drawn.items() if n not in others or others[n].here not in drawn}


def _names(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run: the end of its path, as much as tells it from the others."""
    parts = [run.directory.resolve().parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return ["/".join(part) for part in parts]


def _overview(
    name: str, run: Run, drawn: Mapping[str, list[list[float]]], rollouts: RolloutTable | None
) -> dict[str, Any]:
    notes = [
        *run.notes,
        *(run.trace.problems if run.trace else []),
        *(rollouts.notes if rollouts else []),
    ]
    if (count := len(run.metrics)) > MOST_POINTS:
        notes.append(f"Curves show at most {MOST_POINTS} of {count} steps, evenly.")
    return {
        "name": name,
        "path": str(run.directory.resolve()),
        "state": run.state(),
        "ended": run.ended,
        "notes": notes,
        "learning": learning(drawn),
        "alarms": alarms(run),
        "stages": time_by_stage(drawn),
        "curves": drawn,
        "highlights": asdict(rollouts.highlights) if rollouts else None,
        "estimator": run.flags.get("advantage_estimator"),
    }


def explained(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the row of each metric in the table of metrics, in that table's order, with what other
    systems call it; and last those that the table does not have."""
    order = {row: place for place, row in enumerate(metric_rows())}
    rows = {name: row_of(name) for name in names}
    ranked = sorted(names, key=lambda n: (order[row] if (row := rows[n]) else len(order), n))
    elsewhere: dict[str, list[str]] = {}
    for other in names_elsewhere().values():
        elsewhere.setdefault(other.here, []).append(f"{other.system} {other.there}")
    unknown = {"theme": "other metrics"}
    return {
        name: asdict(row) | {"elsewhere": ", ".join(elsewhere.get(name, []))} if row else unknown
        for name in ranked
        for row in [rows[name]]
    }


def alarms(run: Run) -> list[dict[str, Any]]:
    """Return the alarms that a run's metrics raise under its own flags, as dicts of ``Alarm``."""
    names = {field.name for field in fields(HealthFlags)}
    given = {name: value for name, value in run.flags.items() if name in names}
    limits: dict[str, Any] = {n: None if value == NONE else value for n, value in given.items()}
    return [asdict(alarm) for alarm in find_alarms(run.metrics, HealthFlags(**limits))]
