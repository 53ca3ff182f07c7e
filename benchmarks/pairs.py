"""What measurements share: pauses, the spread of figures, whether the machine was quiet, and what a
process took."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Generic, TypeVar

import torch

PAUSE_S = 1.5  # between measurements: vLLM's processes may spin for a second after their last work
DRIFT = 0.10  # of the reference product: a machine whose speed varies by more has other work
ATTEMPTS = 4  # pairs measured for each that is wanted, at most


def reference_seconds(products: int = 40) -> float:
    """A fixed piece of work: the median of products of 512 x 512 matrices."""
    a = torch.ones(512, 512)
    times = []
    for _ in range(products):
        started = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - started)
    return median(times)


T = TypeVar("T")


class QuietPairs(Generic[T]):
    """Pairs, of which those count that were measured while the machine had no other work.

        quiet = QuietPairs(wanted=5, warmup=2)
        for second_first in quiet:
            quiet.add(measure(second_first))

    goes on until enough are kept, or ``ATTEMPTS`` times as many were measured. A pair is left out
    if a reference product right before or after it took over 10 % longer than the fastest of the
    run: what decides is never the pair itself."""

    def __init__(self, wanted: int, warmup: int = 0) -> None:
        self.wanted, self.warmup = wanted, warmup
        self._pairs: list[T] = []
        self._products: list[float] = []  # the slower of the two around each pair

    @property
    def most(self) -> int:
        """Pairs that are measured if none is quiet."""
        return self.warmup + ATTEMPTS * self.wanted

    def __iter__(self) -> Iterator[bool]:
        """For each pair to measure, whether its second side goes first: it takes turns."""
        for i in range(self.most):
            if len(self.kept) == self.wanted:
                return
            before = reference_seconds()
            yield bool(i % 2)
            self._products.append(max(before, reference_seconds()))
            print(
                f"pair {i + 1}: {len(self.kept)} of {self.wanted} kept", file=sys.stderr, flush=True
            )

    def add(self, pair: T) -> None:
        self._pairs.append(pair)

    @property
    def kept(self) -> list[T]:
        counted = list(zip(self._pairs, self._products, strict=False))[self.warmup :]
        return [pair for pair, product in counted if product <= (1 + DRIFT) * min(self._products)]

    def __str__(self) -> str:
        return (
            f"{len(self.kept)} of {len(self._pairs) - self.warmup} pairs kept: around the others a"
            f" reference product took over {DRIFT:.0%} longer than its fastest"
        )

    def verdict(self) -> str:
        """Why there are no figures; empty where there are."""
        if len(self.kept) == self.wanted:
            return ""
        return f"no figures, the machine had other work: {self}"


def spread(figures: Sequence[float], digits: int = 3) -> str:
    """Median (smallest to largest)."""
    return f"{median(figures):.{digits}f} ({min(figures):.{digits}f} to {max(figures):.{digits}f})"


def busy_seconds(device: str) -> float:
    """A clock of this process's work: of the processor, which other processes do not slow; of the
    wall on a GPU, once it is done with what it was given."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def of_process(field: str) -> int:
    """Bytes of this process's memory, by a name of /proc/self/status: VmRSS, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
