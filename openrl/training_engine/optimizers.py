"""Optimizers by name, and learning-rate schedules, which are those of transformers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from openrl.config.groups.optimizer import OptimizerFlags
from openrl.config.teacher_plan import EarlierPolicy
from openrl.errors import UserError

# number of elements that have fp32 copies at a time; a ZeRO shard can be one huge tensor
CHUNK = 2**24
STATE = ("exp_avg", "exp_avg_sq", "compensation")
# number of elements of a tensor that bitsandbytes can step on: its CUDA kernels take it as a C int
LARGEST_8BIT = 2**31 - 1


@dataclass(frozen=True)
class OptimSpec:
    """How one role is optimised. The schedule ends after ``total_steps`` optimizer steps."""

    learning_rate: float
    flags: OptimizerFlags
    total_steps: int
    # beta of a moving average of the weights, which is then exported; None: no average
    average: float | None = None
    # a copy of the weights that can be evaluated in their place; with beta 1 they stay as they are
    # until ``DeepSpeedEngine.remember``
    earlier: EarlierPolicy | None = None

    @property
    def warmup_steps(self) -> int:
        given = self.flags.lr_warmup_steps
        return math.ceil(self.flags.lr_warmup_ratio * self.total_steps) if given is None else given


def build_optimizer(model: nn.Module, spec: OptimSpec) -> Optimizer:
    """Build the optimizer --optimizer over the trainable parameters. Weight decay acts on matrices
    only, not on biases, norms and other vectors, as in the GPT-3 recipe."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if p.dim() == 2 and in_a_layer(name)]
    for_muon = {*matrices} if spec.flags.optimizer == "muon" else set()
    trainable = [p for _, p in named if p not in for_muon]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": spec.flags.l2},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    match spec.flags.optimizer:
        case "adamw_bf16":
            return BF16AdamW(groups, spec.learning_rate, spec.flags.adam_betas)
        case "adamw_8bit":
            from bitsandbytes.optim import AdamW8bit  # the import searches for GPU libraries

            return AdamW8bit(groups, lr=spec.learning_rate, betas=spec.flags.adam_betas, eps=1e-8)
        case "muon" if for_muon:
            return MuonAndAdamW(matrices, groups, spec)
    return _adamw(groups, spec)


def check_shard(optimizer: str, elements: int, device: str) -> None:
    """Raise UserError if ``optimizer`` cannot step on a tensor of this size, a shard in ZeRO 1 and
    2. The kernels of bitsandbytes would step on a wrong part of it, without an error."""
    if optimizer == "adamw_8bit" and device == "cuda" and elements > LARGEST_8BIT:
        raise UserError(
            f"--optimizer adamw_8bit: a rank steps on {elements:,} elements at a time, and the"
            f" kernels of bitsandbytes count to {LARGEST_8BIT:,}",
            "--zero_stage 3, which steps on smaller pieces, or more ranks",
        )


def _adamw(groups: list[dict[str, Any]], spec: OptimSpec) -> AdamW:
    """Build torch's fused AdamW, which takes a single pass over memory, also on a CPU."""
    return AdamW(groups, lr=spec.learning_rate, betas=spec.flags.adam_betas, eps=1e-8, fused=True)


def in_a_layer(name: str) -> bool:
    """Return whether a parameter is in a numbered layer: not in embeddings or heads."""
    return re.search(r"(^|\.)\d+\.", name) is not None


class MuonAndAdamW(Optimizer):
    """Muon for the matrices of layers and AdamW for the rest, at one learning rate: Muon's updates
    are scaled to the root mean square of AdamW's (https://arxiv.org/abs/2502.16982 section 2.2).

    Both parts share this optimizer's groups and state, so code that replaces parameters in the
    groups, as mixed precision does, reaches the parts too."""

    def __init__(
        self, matrices: list[nn.Parameter], rest: list[dict[str, Any]], spec: OptimSpec
    ) -> None:
        rate, decay = spec.learning_rate, spec.flags.l2
        muon = Muon(
            matrices, lr=rate, weight_decay=decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )
        self._parts: list[Optimizer] = [muon, *([_adamw(rest, spec)] if rest else [])]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()


def build_scheduler(optimizer: Optimizer, spec: OptimSpec) -> LRScheduler:
    """Build the schedule --lr_scheduler. Step it once after each optimizer step."""
    from transformers import get_scheduler  # the import loads peft

    extra: dict[str, dict[str, Any]] = {
        "cosine_with_min_lr": {"min_lr_rate": spec.flags.min_lr_ratio},
        "warmup_stable_decay": {
            "num_decay_steps": max((spec.total_steps - spec.warmup_steps) // 10, 1),
            "min_lr_ratio": spec.flags.min_lr_ratio,
        },
        "polynomial": {"lr_end": 0.0},
    }
    return get_scheduler(
        spec.flags.lr_scheduler,
        optimizer,
        num_warmup_steps=spec.warmup_steps,
        num_training_steps=spec.total_steps,
        scheduler_specific_kwargs=extra.get(spec.flags.lr_scheduler),
    )


def clip_and_measure(model: nn.Module, max_norm: float) -> float:
    """Return the global gradient norm before clipping. Clips in place if ``max_norm`` > 0 and the
    norm is finite."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]).norm()
    if max_norm > 0 and bool(torch.isfinite(norm)):
        nn.utils.clip_grads_with_norm_(
            [p for p in model.parameters() if p.grad is not None], max_norm, norm
        )
    return float(norm)


class BF16AdamW(Optimizer):
    """AdamW in 8 bytes per parameter: the weight, two moments and the weight's compensation term
    (Kahan summation).

    bf16 has 8 bits of mantissa. At usual learning rates rounding would swallow nearly every single
    update (https://arxiv.org/abs/2010.06192 section 4.2), so the compensation accumulates what
    rounding took. The arithmetic is fp32."""

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
