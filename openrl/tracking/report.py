"""What a finished run leaves for people: summary.json, a table and a plot of the learning curve."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from openrl.errors import printable
from openrl.files import write_atomically
from openrl.tracking.jsonl import read_jsonl
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


def write_reports(
    run_dir: Path,
    title: str,
    summary: RunSummary,
    console: Console,
    curve: str,
    **panels: tuple[str, str],
) -> None:
    """Write what a run leaves for people: summary.json, a picture named ``curve``, and a table on
    the console. ``panels`` are those of ``plot_learning_curve``."""
    write_summary(run_dir / "summary.json", summary)
    plot_learning_curve(run_dir / "metrics.jsonl", run_dir / curve, title=title, **panels)
    artefacts = {
        "metrics": run_dir / "metrics.jsonl",
        "rollouts": run_dir / "samples.jsonl",
        "trace": run_dir / "trace",
        "learning curve": run_dir / curve,
        "flags": run_dir / "config.yaml",
    }
    if (run_dir / "config.json").is_file():  # --eval_only leaves no model
        artefacts = {"model": run_dir, **artefacts}
    existing = {name: path for name, path in artefacts.items() if path.exists()}
    console.print(summary_table(summary, existing))


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


def _time_table(seconds_by_stage: Mapping[str, float]) -> Table:
    table = Table("stage", title="Wall time by stage", title_justify="left")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    total = sum(seconds_by_stage.values())
    for stage, seconds in sorted(seconds_by_stage.items(), key=lambda item: -item[1]):
        table.add_row(stage, duration(seconds), f"{seconds / total:.0%}" if total else "")
    return table


def _artefact_table(artefacts: Mapping[str, Path]) -> Table:
    table = Table(title="Artefacts", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, path in artefacts.items():
        table.add_row(label, str(path))
    return table


def plot_learning_curve(
    metrics: Path,
    picture: Path,
    *,
    title: str,
    value: tuple[str, str],
    evaluation: tuple[str, str] | None = None,
) -> None:
    """Draw metrics.jsonl as a PNG: ``value`` over the steps and, beside it, ``evaluation``.

    Each is (metric, heading), e.g. ``("reward", "Training reward")``. A panel without data is left
    out.
    """
    records = list(read_jsonl(metrics))
    panels = []
    for metric, heading in filter(None, (value, evaluation)):
        if points := [(r["step"], float(r[metric])) for r in records if metric in r]:
            panels.append((heading, points, metric == value[0]))
    if panels:
        write_atomically(picture, _draw(title, panels))


def _draw(title: str, panels: list[tuple[str, list[tuple[int, float]], bool]]) -> bytes:
    """Return a PNG. A noisy series is drawn faint under its moving average, any other with a mark
    at each point."""
    import io

    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(4.8 * len(panels), 3.4), dpi=150, layout="constrained")
    figure.suptitle(
        printable(title), parse_math=False, fontsize=11, x=0.02, ha="left", fontweight="bold"
    )
    for axes, (heading, points, noisy) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        steps, values = zip(*points, strict=True)
        if noisy:
            axes.plot(steps, values, color="#9db8d9", linewidth=1)
            axes.plot(steps, smooth(list(values)), color="#1f4e8c", linewidth=2)
        else:
            axes.plot(steps, values, color="#c4571b", linewidth=2, marker="o", markersize=4)
            rises = values[-1] >= values[0]
            # keep the figures clear of the line
            for (step, y), above in {points[0]: not rises, points[-1]: rises}.items():
                shift = (0, 7 if above else -14)
                axes.annotate(
                    f"{y:.2f}",
                    (step, y),
                    textcoords="offset points",
                    xytext=shift,
                    ha="center",
                    fontsize=9,
                )
            axes.margins(x=0.08, y=0.2)
        axes.set_title(heading, fontsize=10, loc="left")
        axes.set_xlabel("step", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y", color="#e5e5e5")
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def smooth(values: list[float], keep: float = 0.8) -> list[float]:
    """Return the exponential moving average without the bias of its start (Adam's correction,
    arXiv:1412.6980)."""
    result, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + 1 - keep
        result.append(total / weight)
    return result
