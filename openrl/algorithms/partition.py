"""What a row costs, and parts of similar costs. Needs only the standard library."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

Part = tuple[float, list[int]]  # its sum and its members


@dataclass(frozen=True)
class RowCost:
    """The cost of a row of n tokens in a forward and backward pass: n + ``attention`` * n^2. The
    unit is a token of a row too short for attention to matter.

    Linear layers take 6 N n operations, where N is the number of parameters that a token passes;
    causal attention takes 6 L h n^2 in L layers of width h (https://arxiv.org/abs/2204.02311
    appendix B, halved for the causal mask). So ``attention`` is L h / N.
    """

    attention: float = 0.0
    # the common prefix of a group's rows is computed once (``row_sizes.RowSizes``)
    shared: bool = False

    def __call__(self, tokens: int) -> float:
        return tokens + self.attention * tokens * tokens


def balanced_parts(
    costs: Sequence[float], parts: int, equal_counts: bool = False
) -> list[list[int]]:
    """Deal the indices of ``costs`` to ``parts`` parts of nearly equal sums, by the largest
    differencing method (Karmarkar and Karp 1982, https://apps.dtic.mil/sti/citations/ADA119205).

    The method keeps merging the two most uneven candidate deals, the largest part of one with the
    smallest of the other. With ``equal_counts`` the parts also have the same number of members,
    give or take one: of every ``parts`` similar costs, each part gets one.
    """
    falling = sorted(range(len(costs)), key=lambda i: -costs[i])
    if parts == 1:
        return [falling]
    width = parts if equal_counts else 1
    deals = [
        [(costs[i], [i]) for i in falling[start : start + width]]
        for start in range(0, len(falling), width)
    ]
    heap = [(-_spread(deal, parts), number, deal) for number, deal in enumerate(deals)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = _merged(first, second, parts)
        heapq.heappush(heap, (-_spread(merged, parts), number, merged))
    found = [members for _, members in heap[0][2]] if heap else []
    return found + [[] for _ in range(parts - len(found))]


def _spread(deal: list[Part], parts: int) -> float:
    """Return the largest minus the smallest part of a falling deal; empty parts count as 0."""
    return deal[0][0] - (deal[-1][0] if len(deal) == parts else 0.0)


def _merged(first: list[Part], second: list[Part], parts: int) -> list[Part]:
    """Merge part i of the one deal, from the largest, with part -i of the other. Uses up both."""
    more, fewer = (first, second) if len(first) >= len(second) else (second, first)
    merged = list(more)
    for place, (load, members) in enumerate(fewer):
        opposite = parts - 1 - place
        if opposite < len(more):
            total, own = more[opposite]
            own.extend(members)  # in place: a copy would cost as much as all merges before it
            merged[opposite] = (total + load, own)
        else:
            merged.append((load, members))
    return sorted(merged, key=lambda part: -part[0])
