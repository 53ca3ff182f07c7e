"""A moving average of the trained weights, kept in host memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class MovingAverage:
    """The fp32 moving average of one rank's masters: ``average = beta * average + (1 - beta) *
    master`` after each optimizer step.

    It starts as a copy of the masters. Each rank averages its own ZeRO shards, so ranks need not
    communicate."""

    def __init__(self, masters: Iterable[Tensor], beta: float) -> None:
        self.beta = beta
        self.tensors = [master.detach().to("cpu", torch.float32, copy=True) for master in masters]

    @torch.no_grad()
    def update(self, masters: Iterable[Tensor]) -> None:
        for average, master in zip(self.tensors, masters, strict=True):
            average.lerp_(master.detach().to("cpu", torch.float32), 1 - self.beta)

    def named(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores, by name."""
        return {f"average.{i}": tensor for i, tensor in enumerate(self.tensors)}

    def load(self, named: dict[str, Tensor]) -> None:
        """The inverse of ``named``."""
        for i, average in enumerate(self.tensors):
            average.copy_(named[f"average.{i}"])
