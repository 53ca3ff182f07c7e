"""Blending: several datasets are loaded, built into rows of some kind, and mixed by probabilities
into one pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from openrl.config.groups.data import probabilities
from openrl.data.loading import RowSource, load_sources
from openrl.data.order import draw_sources, interleave

T = TypeVar("T")


Build = Callable[[list[RowSource]], tuple[list[list[T]], list[str]]]
"""Sources -> the rows built from each, and a line on each for people to read."""


def load_blend(
    names: str,
    split: str,
    probs: str | None,
    max_samples: int,
    build: Build[T],
    seed: int,
    *,
    flag: str,
) -> tuple[list[T], list[str]]:
    """Return the rows of one pass, unshuffled, and a line on each source and on the blend.
    ``names`` and ``probs`` are comma lists, and ``flag`` is the flag that gave the names.

    With probabilities, a row of a small source may occur several times; without them, one dataset
    follows the other. Raises UserError for sources that cannot be read, and whatever ``build``
    raises.
    """
    sources = load_sources(names, split, max_samples, flag=flag, mixed=probs is not None)
    parts, reports = build(sources)
    if probs is None:
        return [row for part in parts for row in part], reports
    sizes = [len(part) for part in parts]
    pairs = interleave(sizes, draw_sources(probabilities(probs), seed), max_samples)
    draws = Counter(source for source, _ in pairs)
    shares = (
        f"{draws[i]} from {source.name} ({sizes[i]} rows, {draws[i] / len(pairs):.0%})"
        for i, source in enumerate(sources)
    )
    line = f"one pass: {len(pairs)} rows, {', '.join(shares)}"
    return [parts[source][row] for source, row in pairs], [*reports, line]
