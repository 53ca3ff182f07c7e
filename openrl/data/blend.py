"""One pass over several datasets: loaded, built into rows of some kind, and blended by
probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from openrl.config.data import probabilities
from openrl.data.loading import RowSource, load_sources
from openrl.data.order import drawn, interleave

T = TypeVar("T")


class Report(Protocol):
    """What became of the rows of a source, for people."""

    def line(self) -> str: ...


Build = Callable[[list[RowSource]], tuple[list[list[T]], Sequence[Report]]]
"""Sources -> the rows made of each, and an account of each."""


@dataclass(frozen=True)
class Datasets:
    """A comma list of datasets as the flags of a command describe it."""

    names: str
    split: str
    probs: str | None  # comma list, one per name; None: one after the other
    max_samples: int
    flag: str  # where the names came from, for messages


@dataclass(frozen=True)
class BlendReport:
    """What one pass over several sources is made of."""

    parts: tuple[tuple[str, int, int], ...]  # (source, draws in one pass, rows)

    def line(self) -> str:
        total = sum(draws for _, draws, _ in self.parts)
        shares = (
            f"{draws} from {name} ({rows} rows, {draws / total:.0%})"
            for name, draws, rows in self.parts
        )
        return f"one pass: {total} rows, {', '.join(shares)}"


def load_blend(datasets: Datasets, build: Build[T], seed: int) -> tuple[list[T], list[Report]]:
    """The rows of one pass, unshuffled, and an account of each source and of the blend.

    With probabilities a row of a small source may stand in it several times. Raises UserError for
    sources that cannot be read, and what ``build`` raises."""
    mixed = datasets.probs is not None
    sources = load_sources(
        datasets.names, datasets.split, datasets.max_samples, flag=datasets.flag, mixed=mixed
    )
    parts, reports = build(sources)
    if datasets.probs is None:
        return [row for part in parts for row in part], list(reports)
    sizes = [len(part) for part in parts]
    pairs = interleave(sizes, drawn(probabilities(datasets.probs), seed), datasets.max_samples)
    draws = Counter(source for source, _ in pairs)
    shares = tuple((source.name, draws[i], sizes[i]) for i, source in enumerate(sources))
    return [parts[source][row] for source, row in pairs], [*reports, BlendReport(shares)]
