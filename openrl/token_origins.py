"""Where an engine's tokens come from: the version of the weights, the set that a token was drawn
from, and the experts that computed it. They travel with the tokens, so that training can weigh each
one by the policy that sampled it."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self


@dataclass(frozen=True)
class VersionSpan:
    """A span of tokens [start, end) sampled by the weights of one sync. Example:
    ``VersionSpan(0, 12, version=3)``."""

    start: int
    end: int
    version: int


@dataclass
class KeptSets:
    """The tokens that top_p, top_k and min_p left to draw each of L tokens from, in 4 bytes per id;
    or, with ``logprobs``, the likeliest tokens at each place, in 8 bytes.

    Example: ``KeptSets.of([[], [7, 9], None])`` says that the first token was drawn from the whole
    vocabulary, or not drawn at all, the second was 7 or 9, and the third one of too many to
    list."""

    sizes: array[int] = field(default_factory=lambda: array("i"))  # [L] 0: all tokens; or UNKNOWN
    ids: array[int] = field(default_factory=lambda: array("i"))  # of one token after the other
    logprobs: array[float] = field(default_factory=lambda: array("f"))  # of ``ids``, or empty

    UNKNOWN = -1  # size of a set with more tokens than ``Sampling.kept_ids``

    @classmethod
    def of(cls, sets: Iterable[list[int] | None]) -> Self:
        found = cls()
        for ids in sets:
            found.append(ids)
        return found

    def append(self, ids: list[int] | None, logprobs: Sequence[float] = ()) -> None:
        """Append the set of one token; None if its tokens were not listed."""
        self.sizes.append(self.UNKNOWN if ids is None else len(ids))
        self.ids.extend(ids or ())
        self.logprobs.extend(logprobs)

    def extend(self, more: KeptSets) -> None:
        self.sizes += more.sizes
        self.ids += more.ids
        self.logprobs += more.logprobs

    def first(self, length: int) -> KeptSets:
        """Return the sets of the first ``length`` tokens."""
        sizes = self.sizes[:length]
        count = sum(size for size in sizes if size > 0)
        return KeptSets(sizes, self.ids[:count], self.logprobs[:count])


@dataclass
class Routes:
    """The experts that the routers of a mixture chose when an engine computed each of L tokens, in
    2 bytes per expert: its first layer with a router, then the next.

    An engine never computes the last token that it samples, nor what stands behind it: their
    experts are UNKNOWN, until a later request computes them. LOST are those of tokens that were
    computed by an engine that did not say how."""

    width: int  # experts per token: layers with a router times experts per layer
    ids: array[int] = field(default_factory=lambda: array("h"))  # [L * width]

    UNKNOWN, LOST = -1, -2

    def __len__(self) -> int:
        return len(self.ids) // self.width

    def first(self, length: int) -> Routes:
        """Return the routes of the first ``length`` tokens, UNKNOWN behind the last."""
        ids = self.ids[: length * self.width]
        ids.extend(array("h", [self.UNKNOWN]) * (length * self.width - len(ids)))
        return Routes(self.width, ids)

    def followed_by(self, later: Routes) -> Routes:
        """Return the routes of the row after a later request, which computed all of it again. A
        token keeps the experts of the request that first computed it, also if they are LOST: they
        led to the next token."""
        found = later.first(max(len(self), len(later)))
        computed = bytes(map(self.UNKNOWN.__ne__, self.ids[:: self.width]))  # a byte per token
        for run in re.finditer(b"\1+", computed):
            span = slice(run.start() * self.width, run.end() * self.width)
            found.ids[span] = self.ids[span]
        return found
