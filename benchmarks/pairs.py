"""What paired measurements share: pauses, the spread of figures, and whether the machine was quiet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

PAUSE_S = 1.5  # between measurements: vLLM's processes may spin for a second after their last work
DRIFT = 0.10  # of the reference product: a machine whose speed varies by more has other work


def reference_seconds(products: int = 40) -> float:
    """A fixed piece of work: the median of products of 512 x 512 matrices."""
    a = torch.ones(512, 512)
    times = []
    for _ in range(products):
        started = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - started)
    return median(times)


class Drift:
    """Looks at the speed of the machine now and then."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def look(self) -> None:
        self.seconds.append(reference_seconds())

    @property
    def share(self) -> float:
        return max(self.seconds) / min(self.seconds) - 1

    def verdict(self) -> str:
        """Why figures mean nothing; empty where they do."""
        if self.share <= DRIFT:
            return ""
        return f"no figures: a reference product drifted by {self.share:.0%}, the machine had other work"


def spread(figures: Sequence[float], digits: int = 3) -> str:
    """Median (smallest to largest)."""
    return f"{median(figures):.{digits}f} ({min(figures):.{digits}f} to {max(figures):.{digits}f})"
