"""Datasets are loaded, built into rows, and joined into one pass, in turn or by probabilities."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from openrl.config.groups.data import probabilities
from openrl.data.loading import RowSource, load_sources
from openrl.errors import counted

T = TypeVar("T")

Build = Callable[[list[RowSource], str], tuple[list[list[T]], list[str]]]
"""Sources, and the flag that gave them -> the rows built from each, and a line on each."""


def load_blend(
    names: str,
    split: str,
    build: Build[T],
    *,
    flag: str,
    max_samples: int | None = None,
    probs: str | None = None,
    seed: int = 0,
) -> tuple[list[T], list[str]]:
    """Return the rows of one pass, unshuffled, and a line on each source and on the blend.
    ``names``, which ``flag`` gave, and ``probs`` are comma lists. ``max_samples`` None takes all.

    With probabilities, rows of a small source may repeat; without, one dataset follows the other.
    Raises UserError for sources that cannot be read, and whatever ``build`` raises.
    """
    sources = load_sources(names, split, max_samples, flag=flag, mixed=probs is not None)
    parts, reports = build(sources, flag)
    if probs is None:
        return [row for part in parts for row in part], reports
    sizes = [len(part) for part in parts]
    blend = interleave(sizes, draw_sources(probabilities(probs), seed))
    pairs = list(islice(blend, max_samples))
    draws = Counter(source for source, _ in pairs)
    shares = (
        f"{draws[i]} from {source.name} ({counted(sizes[i], 'row')}, {draws[i] / len(pairs):.0%})"
        for i, source in enumerate(sources)
    )
    line = f"one pass: {counted(len(pairs), 'row')}, {', '.join(shares)}"
    return [parts[source][row] for source, row in pairs], [*reports, line]


def draw_sources(probabilities: Sequence[float], seed: int) -> Iterator[int]:
    """Yield source numbers without end, each drawn with its probability."""
    rng = random.Random(f"{seed}/blend")
    while True:
        yield from rng.choices(range(len(probabilities)), probabilities, k=1000)


def interleave(sizes: Sequence[int], draws: Iterator[int]) -> Iterator[tuple[int, int]]:
    """Yield (source, row) for each draw until every source has given all its rows at least once.

    A source that is used up starts again, as in ``datasets`` with "all_exhausted".
    """
    taken = [0] * len(sizes)
    unfinished = len(sizes)
    while unfinished:
        source = next(draws)
        yield source, taken[source] % sizes[source]
        taken[source] += 1
        unfinished -= taken[source] == sizes[source]
