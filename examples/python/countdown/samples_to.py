"""How many samples runs took until they solved a share of the problems of their evaluations.

    python examples/python/countdown/samples_to.py --rate 0.5 runs/curriculum/0/uniform runs/curriculum/0/curriculum

The pass rate at an evaluation is the mean of it and its two neighbours; between evaluations it is
interpolated."""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

import yaml


def curve(run: Path) -> list[tuple[float, float]]:
    """(samples so far, smoothed pass rate) at each evaluation of a run. Samples of groups that were
    filtered out count."""
    flags = yaml.safe_load((run / "config.yaml").read_text())
    samples, rates, at = 0.0, [], []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        if "filter/generated_groups" in step:
            samples += step["filter/generated_groups"] * flags["n_samples_per_prompt"]
        else:
            samples += step.get("rollout/samples", 0.0)
        if "eval/pass_rate" in step:
            rates.append(step["eval/pass_rate"])
            at.append(samples)
    windows = [rates[max(i - 1, 0) : i + 2] for i in range(len(rates))]
    return [(n, sum(window) / len(window)) for n, window in zip(at, windows, strict=True)]


def samples_to(rate: float, points: list[tuple[float, float]]) -> float | None:
    """Samples until the rate was reached first; None if it was not."""
    for (before, low), (after, high) in pairwise(points):
        if low < rate <= high:
            return before + (after - before) * (rate - low) / (high - low)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--rate", type=float, required=True)
    args = parser.parse_args()
    for run in args.runs:
        points = curve(run)
        needed = samples_to(args.rate, points)
        found = "not reached" if needed is None else f"after {needed:.0f} samples"
        shown = " ".join(f"{rate:.2f}" for _, rate in points)
        print(f"{run}: {args.rate} {found}; pass rates {shown}")


if __name__ == "__main__":
    main()
