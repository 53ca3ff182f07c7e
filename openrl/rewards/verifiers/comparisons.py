"""What pairwise comparisons say of the answers that were compared. Standard library only.

A table of n players has a row and a column for each: ``table[i][j]`` is the share in [0, 1] that i
won of its comparisons with j (a tie is half), None if they were not compared, and
``table[j][i] == 1 - table[i][j]``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean

Table = Sequence[Sequence[float | None]]
ROUNDS = 1000  # of the fit at most
PRECISION = 1e-10  # of log-strengths


def met(table: Table) -> list[list[int]]:
    """Return for each player whom it was compared with."""
    return [[j for j, won in enumerate(row) if won is not None] for row in table]


def win_rates(table: Table) -> list[float | None]:
    """Return the mean share that each player won against those it met; None if it met nobody."""
    shares = [[won for won in row if won is not None] for row in table]
    return [mean(row) if row else None for row in shares]


def bradley_terry(table: Table) -> list[float | None]:
    """Return the probability with which each player beats one of average strength, under the model
    P(i beats j) = s_i / (s_i + s_j) of Bradley and Terry (1952); None if it met nobody.

    Each player has also tied once with one of strength 1: without this, who won or lost every
    comparison would have no finite strength. The likelihood is maximised by the MM rounds of Hunter
    (2004, equation 3), s_i = wins_i / sum_j 1 / (s_i + s_j). Unlike win rates, this weighs a win by
    whom it was against, which matters where not all pairs were compared."""
    opponents = met(table)
    wins = [0.5 + sum(won for won in row if won is not None) for row in table]
    strengths = [1.0] * len(table)
    for _ in range(ROUNDS):
        moved = 0.0
        for i, others in enumerate(opponents):
            shares = sum(1 / (strengths[i] + strengths[j]) for j in others)
            new = wins[i] / (shares + 1 / (strengths[i] + 1))
            moved = max(moved, abs(math.log(new / strengths[i])))
            strengths[i] = new
        if moved < PRECISION:
            break
    return [s / (s + 1) if others else None for s, others in zip(strengths, opponents, strict=True)]


SCORINGS = {"win_rate": win_rates, "bradley_terry": bradley_terry}


def pairs_of(count: int, opponents: int) -> list[tuple[int, int]]:
    """Return the pairs to compare: all, or with ``opponents`` those of a circle in which each
    player meets at least so many of its neighbours, with as few pairs as that needs."""
    everyone = [(i, j) for i in range(count) for j in range(i + 1, count)]
    if not opponents or opponents >= count - 1:
        return everyone
    reach = (opponents + 1) // 2
    return [(i, j) for i, j in everyone if min(j - i, count - j + i) <= reach]
