"""AdamW with bf16 weights and moments, which carries the rounding error of the weights along."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# number of elements that have fp32 copies at a time; a ZeRO shard can be one huge tensor
CHUNK = 2**24
STATE = ("exp_avg", "exp_avg_sq", "compensation")


class BF16AdamW(Optimizer):
    """AdamW in 8 bytes per parameter: the weight, two moments and the weight's compensation term
    (Kahan summation).

    bf16 has 8 bits of mantissa. At usual learning rates rounding would swallow nearly every single
    update (https://arxiv.org/abs/2010.06192 section 4.2), so the compensation accumulates what
    rounding took. The arithmetic is fp32.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state |= {"step": 0} | {name: torch.zeros_like(weight) for name in STATE}
                state["step"] += 1
                tensors = (weight, weight.grad, *(state[name] for name in STATE))
                for parts in zip(*(t.reshape(-1).split(CHUNK) for t in tensors), strict=True):
                    _update(parts, group, state["step"])


def _update(parts: tuple[Tensor, ...], group: dict[str, Any], step: int) -> None:
    weight, grad, exp_avg, exp_avg_sq, lost = parts
    (beta1, beta2), rate, gradient = group["betas"], group["lr"], grad.float()
    mean = exp_avg.float().lerp_(gradient, 1 - beta1)
    square = exp_avg_sq.float().lerp_(gradient.square(), 1 - beta2)
    scale = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    exact = (weight.float() + lost.float()).mul_(1 - rate * group["weight_decay"])
    exact.addcdiv_(mean, scale, value=-rate / (1 - beta1**step))
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(square)
    weight.copy_(exact)
    lost.copy_(exact - weight.float())
