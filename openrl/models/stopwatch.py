"""Timing of work on a device without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    def __init__(self) -> None:
        self._seconds = 0.0
        self._under_way: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self, on_gpu: bool) -> Iterator[None]:
        """Time the calls inside. Calls to a GPU return before their work is done, so events go into
        its queue."""
        if not on_gpu:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._under_way.append((first, last))

    def take(self) -> float:
        """Return the seconds measured since the last call."""
        for first, last in self._under_way:
            last.synchronize()
            self._seconds += first.elapsed_time(last) / 1000
        found, self._seconds = self._seconds, 0.0
        self._under_way.clear()
        return found
