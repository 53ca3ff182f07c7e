"""The figures of a finished run: summary.json, and a table on the console."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from openrl.files import write_atomically
from openrl.tracking.progress import duration


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The figures of a run. Pass rates are in [0, 1]. None means that nothing was measured: no step
    was trained, nothing was evaluated, or no reward gave a verdict."""

    steps: int
    seconds_by_stage: Mapping[str, float]  # of this process; a resumed run counts from its resume
    samples_per_second: float | None
    tokens_per_second: float | None
    eval_pass_before: float | None = None
    eval_pass_after: float | None = None
    eval_reward_before: float | None = None
    eval_reward_after: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)  # further keys of summary.json


def write_summary(path: Path, summary: RunSummary) -> None:
    """Write summary.json atomically; the keys of ``more`` join the others."""
    record = asdict(summary)
    more = record.pop("more")
    write_atomically(path, json.dumps({**record, **more}, indent=2) + "\n")


def summary_table(summary: RunSummary, artefacts: Mapping[str, Path]) -> Group:
    """Return the closing table for ``Console.print``: before and after, wall time by stage, and
    where the artefacts are."""
    tables = [
        _result_table(summary),
        _time_table(summary.seconds_by_stage),
        _artefact_table(artefacts),
    ]
    return Group(*(t for t in tables if t.row_count))


def _result_table(summary: RunSummary) -> Table:
    table = Table(title="Result", title_justify="left", show_header=False)
    passes = ("pass rate", summary.eval_pass_before, summary.eval_pass_after)
    rewards = ("reward", summary.eval_reward_before, summary.eval_reward_after)
    figure, before, after = rewards if summary.eval_pass_after is None else passes
    for when, value in (("before", before), ("after", after)):
        if value is not None:
            table.add_row(f"evaluation {when}: {figure}", f"{value:.3f}")
    if before is not None and after is not None:
        table.add_row(
            "gain", f"{after - before:+.3f}", style="bold green" if after > before else "bold red"
        )
    table.add_row("steps", str(summary.steps))
    if names := [alarm["name"] for alarm in summary.more.get("alarms", ())]:
        table.add_row("warnings", ", ".join(names), style="bold yellow")
    if summary.samples_per_second is not None:
        table.add_row("samples/s", f"{summary.samples_per_second:.1f}")
    if summary.tokens_per_second is not None:
        table.add_row("tokens/s", f"{summary.tokens_per_second:.0f}")
    return table


_STAGES = {"annotate": "annotate (log-probs, values)"}
"""What the names of stages alone do not tell."""


def _time_table(seconds_by_stage: Mapping[str, float]) -> Table:
    table = Table("stage", title="Wall time by stage", title_justify="left")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    total = sum(seconds_by_stage.values())
    for stage, seconds in sorted(seconds_by_stage.items(), key=lambda item: -item[1]):
        table.add_row(
            _STAGES.get(stage, stage), duration(seconds), f"{seconds / total:.0%}" if total else ""
        )
    return table


def _artefact_table(artefacts: Mapping[str, Path]) -> Table:
    table = Table(title="Artefacts", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, path in artefacts.items():
        table.add_row(label, str(path))
    return table
