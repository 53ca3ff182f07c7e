"""Which trajectories to look at first."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from openrl.trace.index import Columns

MOST = 10  # of each list
MOST_COMPARED = 4000  # answers whose kind is looked at
NEW = 0.5  # share of an answer's pieces above which its kind is new
WIDTH = 4  # characters of a piece


@dataclass(frozen=True)
class Highlights:
    """Rows of a table of trajectories. ``since`` is the step at which the reward had risen half of
    its way; None if it has not risen."""

    since: int | None = None
    new_kind: list[int] = field(default_factory=list)
    new_share: float | None = None  # of the answers of highest reward after ``since``
    longest: list[int] = field(default_factory=list)
    largest_gap: list[int] = field(default_factory=list)

    @property
    def rows(self) -> list[int]:
        return [*self.new_kind, *self.longest, *self.largest_gap]


def find_highlights(columns: Columns) -> Highlights:
    """Return the answers of highest reward whose kind is new, the longest, and those with the
    largest gap between trainer and engine."""
    answers = [
        row
        for row, (tag, role) in enumerate(zip(columns["tag"], columns["role"], strict=True))
        if tag != "evaluation" and role == "answer"
    ]
    since = rise(columns, answers)
    new_kind, share = _new_kind(columns, answers, since)
    longest = _largest(answers, lambda row: columns["tokens"][row])
    gaps = _largest(answers, lambda row: columns["gap_max"][row])
    return Highlights(since, new_kind, share, longest, gaps)


def rise(columns: Columns, rows: Sequence[int]) -> int | None:
    """Return the first step whose mean reward is halfway from that of the first tenth of the steps
    to that of the last tenth; None if these differ by less than a twentieth of the rewards' span.
    """
    by_step: dict[int, list[float]] = {}
    for row in rows:
        if (reward := columns["reward"][row]) is not None:
            by_step.setdefault(columns["step"][row], []).append(reward)
    steps = sorted(by_step)
    means = [fmean(by_step[step]) for step in steps]
    if len(means) < 2:
        return None
    tenth = max(1, len(means) // 10)
    first, last = fmean(means[:tenth]), fmean(means[-tenth:])
    rewards = [reward for step in steps for reward in by_step[step]]
    if last - first < 0.05 * (max(rewards) - min(rewards)) or last <= first:
        return None
    halfway = (first + last) / 2
    return next(step for step, mean in zip(steps, means, strict=True) if mean >= halfway)


def _new_kind(
    columns: Columns, rows: Sequence[int], since: int | None
) -> tuple[list[int], float | None]:
    """Return the answers of highest reward that are unlike those before the rise, the newest kinds
    first and each once; and which share of the best answers since then is new."""
    if since is None:
        return [], None
    texts, rewards = columns["text"], columns["reward"]
    before = _evenly([row for row in rows if columns["step"][row] < since])
    after = _evenly([r for r in rows if columns["step"][r] >= since and rewards[r] is not None])
    best = max((rewards[row] for row in after), default=None)
    if not before or best is None:
        return [], None
    counts = Counter(piece for row in before for piece in kind(texts[row]))
    known = {piece for piece, count in counts.items() if count > 1}
    top = [row for row in after if rewards[row] == best]
    kinds = {row: kind(texts[row]) for row in top}
    news = {row: len(kinds[row] - known) / max(1, len(kinds[row])) for row in top}
    new = sorted((row for row in top if news[row] > NEW), key=lambda row: -news[row])
    distinct: list[int] = []
    for row in new:
        if all(_alike(kinds[row], kinds[other]) < NEW for other in distinct):
            distinct.append(row)
    others = [row for row in new if row not in distinct]
    return (distinct + others)[:MOST], len(new) / len(top)


def kind(text: str) -> set[str]:
    """Return the pieces of a text that say which kind of answer it is: WIDTH characters each, of
    lower case, with 0 for every number.

    >>> sorted(kind("12 + 7 = 19"))
    [' + 0', ' = 0', '+ 0 ', '0 + ', '0 = ']
    """
    plain = " ".join(re.sub(r"\d+", "0", text.lower()).split())
    return {plain[n : n + WIDTH] for n in range(max(1, len(plain) - WIDTH + 1))}


def _alike(one: set[str], other: set[str]) -> float:
    return len(one & other) / max(1, len(one | other))


def _evenly(rows: Sequence[int]) -> Sequence[int]:
    return rows[:: math.ceil(len(rows) / MOST_COMPARED) or 1]


def _largest(rows: Sequence[int], value: Callable[[int], float | None]) -> list[int]:
    known = [(found, row) for row in rows if (found := value(row)) is not None]
    return [row for _, row in sorted(known, key=lambda item: (-item[0], item[1]))[:MOST]]
