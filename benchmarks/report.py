"""How long a report takes to be written, and to open in Chromium (Debian: chromium, chromium-driver).

python -m benchmarks.report [--steps 10000] [--trajectories 100000]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from benchmarks.trace import SIBLINGS, learned, played
from openrl.config.groups.logging import TraceFlags
from openrl.report.page import NAME, write_report
from openrl.trace.writer import TraceWriter
from openrl.tracking.metric_rows import metric_rows
from tests.browser import browser

GROUPS = 5  # of a kept step


def write_run(directory: Path, steps: int, trajectories: int) -> None:
    """Write the metrics of all steps, and the trajectories of as many steps as have them."""
    draw = random.Random(0)
    names = [row.name for row in metric_rows() if not any(c.isupper() for c in row.name)]
    with open(directory / "metrics.jsonl", "w", encoding="ascii") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"step": step} | {name: draw.random() for name in names}) + "\n")
    kept = trajectories // (GROUPS * SIBLINGS)
    writer = TraceWriter(directory / "trace", TraceFlags(trace_sample_rate=1.0))
    groups = played(GROUPS * SIBLINGS, 16)
    for step in range(1, steps + 1, max(1, steps // kept)):
        writer.played(step, groups, [*range(GROUPS)], step, {})
        writer.learned(step, learned(groups))
    writer.close()


def measure(steps: int, trajectories: int) -> None:
    with tempfile.TemporaryDirectory() as found:
        directory = Path(found)
        write_run(directory, steps, trajectories)
        started = time.process_time()
        write_report([directory], directory / NAME)
        written = time.process_time() - started
        size = (directory / NAME).stat().st_size / 2**20
        print(f"written in {written:.1f} s of a processor, {size:.0f} MiB")
        with browser("--window-size=1400,1000") as window:
            for _ in range(3):
                window.open((directory / NAME).as_uri())
                window.wait("return document.documentElement.dataset.ready === 'yes'")
                script = (
                    "return [performance.getEntriesByName('first-contentful-paint')[0].startTime,"
                    " performance.getEntriesByName('ready')[0].startTime]"
                )
                painted, ready = window.run(script)
                print(
                    f"first painted after {painted / 1000:.2f} s, whole after {ready / 1000:.2f} s"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--trajectories", type=int, default=100_000)
    given = parser.parse_args()
    measure(given.steps, given.trajectories)
