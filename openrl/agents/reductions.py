"""Reduces the metrics of an episode's steps to those of the episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "sum": sum,
    "min": min,
    "max": max,
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
}


def reduce_metrics(
    steps: Sequence[Mapping[str, float]], reductions: Mapping[str, str]
) -> dict[str, float]:
    """Reduce each metric over the steps that have it, by the mean if ``reductions`` does not name
    it."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {
        name: float(REDUCTIONS[reductions.get(name, "mean")]([s[name] for s in steps if name in s]))
        for name in names
    }
