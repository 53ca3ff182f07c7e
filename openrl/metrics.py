"""Measured values that know how they reduce over micro-batches, ranks and steps. Needs only the
standard library.

The code that measures picks the kind; nothing downstream guesses it from a name. Merging is
associative, so any grouping of micro-batches and ranks gives the same figure; for every kind but
``Last`` the order does not matter either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Mean:
    """A weighted mean. ``Mean(total=7.5, weight=3)`` is three tokens whose values sum to 7.5."""

    total: float
    weight: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        """Return the mean of values that weigh the same."""
        listed = list(values)
        return cls(float(sum(listed)), len(listed))

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> float | None:
        """The mean, or None without any weight: nothing was measured, which is not 0."""
        return self.total / self.weight if self.weight else None


@dataclass(frozen=True)
class Sum:
    """A count or an amount that adds up."""

    value: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True)
class Max:
    """The largest value; a NaN stays visible."""

    value: float

    def merge(self, other: Max) -> Max:
        return self if math.isnan(self.value) or self.value >= other.value else other


@dataclass(frozen=True)
class Min:
    """The smallest value; a NaN stays visible."""

    value: float

    def merge(self, other: Min) -> Min:
        return self if math.isnan(self.value) or self.value <= other.value else other


@dataclass(frozen=True)
class Last:
    """The newest value, for values that are states (learning rate, a coefficient) or equal on every
    rank."""

    value: float

    def merge(self, other: Last) -> Last:
        return other


@dataclass(frozen=True)
class ByRow:
    """What was measured on single rows of a batch, by their number; no figure of a step."""

    rows: Mapping[int, Any]
    value: None = None

    def merge(self, other: ByRow) -> ByRow:
        return ByRow({**self.rows, **other.rows})


class Metric(Protocol):
    """Any of the kinds above; another kind may join them if it merges."""

    @property
    def value(self) -> float | None: ...

    def merge(self, other: Any) -> Any: ...


def merge_all(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge by name; a name may be missing in some parts. Raises TypeError if a name has two
    kinds."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            before = merged.get(name)
            if before is not None and type(before) is not type(metric):
                raise TypeError(
                    f"metric {name!r} is a {type(before).__name__} here and a"
                    f" {type(metric).__name__} there"
                )
            merged[name] = metric if before is None else before.merge(metric)
    return merged


def to_floats(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return plain numbers; a mean without weight is absent."""
    return {name: float(m.value) for name, m in metrics.items() if m.value is not None}
