"""What every run leaves at its end: summary.json, report.html, and a table on the console."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Group

from openrl.errors import UserError
from openrl.report.page import NAME, write_report
from openrl.tracking.summary import RunSummary, summary_table, write_summary


def write_reports(run_dir: Path, summary: RunSummary, note: Callable[[str], None]) -> Path | None:
    """Write summary.json and the report, and return the latter's path. What cannot be written, such
    as on a full disk, costs a ``note``."""
    path = run_dir / "summary.json"
    try:
        write_summary(path, summary)
        path = run_dir / NAME
        write_report([run_dir], path)
    except (OSError, UserError) as error:
        note(f"{path} was not written: {error}")
        return None
    return path


def closing_table(run_dir: Path, summary: RunSummary) -> Group:
    """Return the figures of a run, and where its files are, for ``Console.print``."""
    artefacts = {
        "report": run_dir / NAME,
        "metrics": run_dir / "metrics.jsonl",
        "rollouts": run_dir / "trace",
        "flags": run_dir / "config.yaml",
    }
    if (run_dir / "config.json").is_file():  # --eval_only leaves no model
        artefacts = {"model": run_dir, **artefacts}
    existing = {name: path for name, path in artefacts.items() if path.exists()}
    return summary_table(summary, existing)
