"""AdamW with decay on matrices only, and the learning-rate schedules of transformers by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from openrl.config.learning import LearningRateFlags, OptimizerFlags


@dataclass(frozen=True)
class OptimSpec:
    """How one role is optimised. ``total_steps`` counts optimizer steps, where the schedule ends."""

    learning_rate: float
    scheduler: str
    warmup_steps: int
    min_lr_ratio: float
    weight_decay: float
    betas: tuple[float, float]
    max_norm: float
    total_steps: int

    @classmethod
    def from_flags(cls, rate: LearningRateFlags, optim: OptimizerFlags, total_steps: int) -> OptimSpec:
        return cls(
            rate.learning_rate,
            optim.lr_scheduler,
            math.ceil(optim.lr_warmup_ratio * total_steps) if optim.lr_warmup_steps is None else optim.lr_warmup_steps,
            optim.min_lr_ratio,
            optim.l2,
            optim.adam_betas,
            optim.max_norm,
            total_steps,
        )


def build_optimizer(model: nn.Module, spec: OptimSpec) -> AdamW:
    """AdamW over the trainable parameters, fused where torch has it (one pass, also on a CPU).

    Weight decay acts on matrices; biases, norms and other vectors are left out, as in the GPT-3 recipe.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return AdamW([g for g in groups if g["params"]], lr=spec.learning_rate, betas=spec.betas, eps=1e-8, fused=True)


def build_scheduler(optimizer: Optimizer, spec: OptimSpec) -> LRScheduler:
    """The schedule ``spec.scheduler``; step it once after each optimizer step."""
    extra: dict[str, dict[str, Any]] = {
        "cosine_with_min_lr": {"min_lr_rate": spec.min_lr_ratio},
        "warmup_stable_decay": {
            "num_decay_steps": max((spec.total_steps - spec.warmup_steps) // 10, 1),
            "min_lr_ratio": spec.min_lr_ratio,
        },
        "polynomial": {"lr_end": 0.0},
    }
    return get_scheduler(
        spec.scheduler,
        optimizer,
        num_warmup_steps=spec.warmup_steps,
        num_training_steps=spec.total_steps,
        scheduler_specific_kwargs=extra.get(spec.scheduler),
    )


def clip_and_measure(model: nn.Module, max_norm: float) -> float:
    """Global gradient norm before clipping; clips in place if ``max_norm`` > 0."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    if max_norm > 0 and bool(torch.isfinite(norm)):
        nn.utils.clip_grads_with_norm_([p for p in model.parameters() if p.grad is not None], max_norm, norm)
    return float(norm)
