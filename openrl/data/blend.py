"""Blending: several datasets are loaded, built into rows of some kind, and mixed by probabilities
into one pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from openrl.config.groups.data import probabilities
from openrl.data.loading import RowSource, load_sources
from openrl.data.order import draw_sources, interleave

T = TypeVar("T")


class Report(Protocol):
    """A report for people on the rows of a source."""

    def line(self) -> str: ...


Build = Callable[[list[RowSource]], tuple[list[list[T]], Sequence[Report]]]
"""Sources -> the rows built from each, and a report on each."""


@dataclass(frozen=True)
class BlendReport:
    """How many draws of one pass come from each source."""

    parts: tuple[tuple[str, int, int], ...]  # (source, draws in one pass, rows)

    def line(self) -> str:
        total = sum(draws for _, draws, _ in self.parts)
        shares = (
            f"{draws} from {name} ({rows} rows, {draws / total:.0%})"
            for name, draws, rows in self.parts
        )
        return f"one pass: {total} rows, {', '.join(shares)}"


def load_blend(
    names: str,
    split: str,
    probs: str | None,
    max_samples: int,
    build: Build[T],
    seed: int,
    *,
    flag: str,
) -> tuple[list[T], list[Report]]:
    """Return the rows of one pass, unshuffled, and a report on each source and on the blend.
    ``names`` and ``probs`` are comma lists, and ``flag`` is the flag that gave the names.

    With probabilities, a row of a small source may occur several times; without them, one dataset
    follows the other. Raises UserError for sources that cannot be read, and whatever ``build``
    raises.
    """
    sources = load_sources(names, split, max_samples, flag=flag, mixed=probs is not None)
    parts, reports = build(sources)
    if probs is None:
        return [row for part in parts for row in part], list(reports)
    sizes = [len(part) for part in parts]
    pairs = interleave(sizes, draw_sources(probabilities(probs), seed), max_samples)
    draws = Counter(source for source, _ in pairs)
    shares = tuple((source.name, draws[i], sizes[i]) for i, source in enumerate(sources))
    return [parts[source][row] for source, row in pairs], [*reports, BlendReport(shares)]
