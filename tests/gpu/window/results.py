"""What the steps of a window on a GPU found: lines of JSON, each written as soon as its step ends, since
the window may close at any moment; and the table that they make.

Scripts call ``record`` and ``measured``. Under pytest the module is a plugin, ``-p
tests.gpu.window.results``, that writes a line for each test, and one for the test that runs when the
time is up."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

RESULTS = "OPENRL_GPU_RESULTS"
"""The environment variable with the file's name."""

MOST_TEXT = 1500  # characters of a reason, from its end
failed: set[str] = set()
"""The steps of this process that failed."""


def record(
    step: str, outcome: str, seconds: float, figures: dict[str, Any] | None = None, why: str = ""
) -> None:
    """Append a line. ``outcome`` is passed, failed, skipped or timeout."""
    line = {
        "step": step,
        "outcome": outcome,
        "seconds": round(seconds, 2),
        "figures": figures or {},
        "why": why[-MOST_TEXT:],
    }
    text = json.dumps(line, default=str)
    with open(os.environ[RESULTS], "a", encoding="utf-8") as file:
        file.write(f"{text}\n")
    print(text, flush=True)


@contextmanager
def measured(step: str) -> Iterator[dict[str, Any]]:
    """Record what the block puts into the dictionary. If the block raises, the step has failed, and
    the program goes on."""
    figures: dict[str, Any] = {}
    started = time.perf_counter()
    try:
        yield figures
    except Exception:
        failed.add(step)
        record(step, "failed", time.perf_counter() - started, figures, traceback.format_exc())
    else:
        record(step, "passed", time.perf_counter() - started, figures)


# -- the table -------------------------------------------------------------------------------------


def table(files: Iterable[Path]) -> str:
    """Return what ran and its figures as Markdown. A later line on a step replaces an earlier one,
    so the files of several windows are given in their order."""
    steps: dict[str, dict[str, Any]] = {}
    for path in files:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found = json.loads(line)
            except ValueError:  # the window closed in the middle of it
                continue
            steps[found["step"]] = found
    counts = Counter(found["outcome"] for found in steps.values())
    lines = [", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())), ""]
    lines += ["| step | outcome | s | figure | value |", "|---|---|---|---|---|"]
    for name, found in steps.items():
        cells = [name, found["outcome"], _show(found["seconds"])]
        for figure, value in found["figures"].items() or [("", "")]:
            row = " | ".join([*cells, figure, _show(value)]).replace("\n", " ")
            lines.append(f"| {row} |")
            cells = ["", "", ""]
    for name, found in steps.items():
        if found["outcome"] in ("failed", "timeout") and found["why"]:
            lines += ["", f"## {name}", "```", found["why"].strip(), "```"]
    return "\n".join(lines)


def _show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# -- the plugin of pytest --------------------------------------------------------------------------

_now: list[tuple[str, float]] = []
"""The test that runs, and when it began."""


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGTERM, _end)


def pytest_runtest_logstart(nodeid: str) -> None:
    _now[:] = [(_short(nodeid), time.perf_counter())]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    why = ""
    if report.failed:
        why = str(report.longrepr)
    elif report.skipped and isinstance(report.longrepr, tuple):
        why = str(report.longrepr[-1])
    figures = dict(report.user_properties)
    record(_short(report.nodeid), report.outcome, report.duration, figures, why)


def _end(number: int, frame: FrameType | None) -> None:
    """Note where the test was when the window closed."""
    for name, started in _now:
        where = "".join(traceback.format_stack(frame)[-12:])
        record(name, "timeout", time.perf_counter() - started, why=where)
    os._exit(128 + number)


def _short(nodeid: str) -> str:
    return nodeid.partition("tests/gpu/")[2] or nodeid
