"""What every run leaves at its end: summary.json, report.html, and a table on the console."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from openrl.errors import UserError
from openrl.report.page import NAME, write_report
from openrl.tracking.summary import RunSummary, summary_table, write_summary


def write_reports(run_dir: Path, summary: RunSummary, console: Console) -> None:
    """Write what a run leaves for people. A report that cannot be written, such as on a full disk,
    costs a line."""
    write_summary(run_dir / "summary.json", summary)
    try:
        write_report([run_dir], run_dir / NAME)
    except (OSError, UserError) as error:
        console.print(f"{run_dir / NAME} was not written: {error}")
    artefacts = {
        "report": run_dir / NAME,
        "metrics": run_dir / "metrics.jsonl",
        "rollouts": run_dir / "trace",
        "flags": run_dir / "config.yaml",
    }
    if (run_dir / "config.json").is_file():  # --eval_only leaves no model
        artefacts = {"model": run_dir, **artefacts}
    existing = {name: path for name, path in artefacts.items() if path.exists()}
    console.print(summary_table(summary, existing))
