"""Dealing work out: parts of like sums, bins of limited size. Pure numbers, standard library
alone."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

Part = tuple[float, list[int]]  # its sum, and who is in it


@dataclass(frozen=True)
class RowCost:
    """What a row of n tokens costs in a forward and backward pass, counted in tokens of a row too
    short for attention to matter: n + ``attention`` * n^2.

    Linear layers take 6 N n operations, N being the parameters that a token passes, and causal
    attention 6 L h n^2 in L layers of width h (https://arxiv.org/abs/2204.02311 appendix B, half of
    it for the causal mask), so ``attention`` is L h / N. Balanced by tokens alone, ranks with a row
    of 64k tokens take 5 % longer than the others."""

    attention: float = 0.0
    # what the rows of a group begin with is computed once (``row_sizes.RowSizes``)
    shared: bool = False

    def __call__(self, tokens: int) -> float:
        return tokens + self.attention * tokens * tokens


def balanced_parts(
    costs: Sequence[float], parts: int, equal_counts: bool = False
) -> list[list[int]]:
    """Indices of ``costs`` dealt to ``parts`` parts of nearly equal sums, by the largest
    differencing method (Karmarkar and Karp 1982, https://apps.dtic.mil/sti/citations/ADA119205).

    Candidate deals are merged, always the two most uneven ones, the largest part of one with the
    smallest of the other. With ``equal_counts`` parts also hold equally many, give or take one, and
    each one of every ``parts`` like costs."""
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
    """Largest minus smallest part of a deal that stands in falling order, empty parts left out."""
    return deal[0][0] - (deal[-1][0] if len(deal) == parts else 0.0)


def _merged(first: list[Part], second: list[Part], parts: int) -> list[Part]:
    """Part i of the one, the largest first, with part -i of the other."""
    more, fewer = (first, second) if len(first) >= len(second) else (second, first)
    merged = list(more)
    for place, (load, members) in enumerate(fewer):
        opposite = parts - 1 - place
        if opposite < len(more):
            merged[opposite] = (more[opposite][0] + load, more[opposite][1] + members)
        else:
            merged.append((load, members))
    return sorted(merged, key=lambda part: -part[0])


def first_fit(sizes: Sequence[int], cap: int) -> list[list[int]]:
    """Indices of ``sizes`` in bins of at most ``cap``, the largest first, each into the first bin
    that has room: at most 11/9 of the fewest bins, plus 6/9 (Dosa 2007). ValueError if one is
    larger than a bin."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if sizes[i] > cap:
            raise ValueError(f"{sizes[i]} does not fit into {cap}")
        place = next((b for b, room in enumerate(rooms) if room >= sizes[i]), len(bins))
        if place == len(bins):
            bins.append([])
            rooms.append(cap)
        bins[place].append(i)
        rooms[place] -= sizes[i]
    return bins


def capped_parts(
    sizes: Sequence[int], costs: Sequence[float], cap: int, parts: int
) -> list[list[int]]:
    """Indices in ``parts`` bins of at most ``cap``, of like costs if the caps leave the choice;
    some may be empty.

    ``parts`` must be at least the number of bins that ``first_fit`` takes.
    """
    loads, rooms = [0.0] * parts, [cap] * parts
    bins: list[list[int]] = [[] for _ in range(parts)]
    for i in sorted(range(len(sizes)), key=lambda i: -costs[i]):
        open_bins = [b for b in range(parts) if rooms[b] >= sizes[i]]
        if not open_bins:  # like loads left no room: fill bins one after the other
            filled = first_fit(sizes, cap)
            return filled + [[] for _ in range(parts - len(filled))]
        place = min(open_bins, key=lambda b: loads[b])
        bins[place].append(i)
        loads[place] += costs[i]
        rooms[place] -= sizes[i]
    return bins
