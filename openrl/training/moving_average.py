"""A moving average of the trained weights, kept beside them in host memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class MovingAverage:
    """Of one rank's masters, in fp32: ``average = beta * average + (1 - beta) * master`` after each
    optimizer step.

    It starts as the masters themselves. Shards of ZeRO are averaged where they are, so ranks say
    nothing to each other."""

    def __init__(self, masters: Iterable[Tensor], beta: float) -> None:
        self.beta = beta
        self.tensors = [master.detach().to("cpu", torch.float32, copy=True) for master in masters]

    @torch.no_grad()
    def update(self, masters: Iterable[Tensor]) -> None:
        for average, master in zip(self.tensors, masters, strict=True):
            average.lerp_(master.detach().to("cpu", torch.float32), 1 - self.beta)

    def named(self) -> dict[str, Tensor]:
        """What a resume needs."""
        return {f"average.{i}": tensor for i, tensor in enumerate(self.tensors)}

    def load(self, named: dict[str, Tensor]) -> None:
        """The inverse of ``named``."""
        for i, average in enumerate(self.tensors):
            average.copy_(named[f"average.{i}"])
