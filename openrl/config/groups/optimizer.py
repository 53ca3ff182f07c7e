"""Flags of optimizers and learning rates."""

from __future__ import annotations

from typing import Literal

from openrl.flags.schema import absent, flag, given, group

Scheduler = Literal[
    "cosine_with_min_lr", "cosine", "linear", "constant", "constant_with_warmup", "inverse_sqrt",
    "polynomial", "cosine_with_restarts", "warmup_stable_decay",
]  # fmt: skip
OptimizerName = Literal["adamw", "adamw_bf16", "adamw_8bit", "muon"]

FLOORED_SCHEDULES = ("cosine_with_min_lr", "warmup_stable_decay")
"""Schedules that end at --min_lr_ratio; the others end where their formulas do."""


@group("Optimizer")
class LearningRateFlags:
    """Appears once per trained role: with the prefix actor_ or critic_, or with none."""

    learning_rate: float = flag(1e-6, "Peak learning rate.", bounds="> 0")


@group("Optimizer")
class OptimizerFlags:
    optimizer: OptimizerName = flag(
        "adamw",
        "adamw: fp32 masters and moments; adamw_bf16: bf16 weights, gradients and moments with"
        " Kahan compensation, 10 bytes a parameter; adamw_8bit: 8-bit moments of bitsandbytes;"
        " muon: Muon for the layers' matrices, adamw for the rest.",
    )
    lr_scheduler: Scheduler = flag(
        "cosine_with_min_lr",
        "Learning-rate schedule, by its transformers name, in optimizer steps.",
    )
    lr_warmup_ratio: float = flag(
        0.03,
        "Warm-up: share of all optimizer steps in which the learning rate rises.",
        bounds="[0, 1]",
        only_if=absent("lr_scheduler", "constant"),
    )
    lr_warmup_steps: int | None = flag(
        None,
        "Warm-up: optimizer steps in which the learning rate rises. None: set by"
        " --lr_warmup_ratio.",
        bounds=">= 0",
        only_if=absent("lr_scheduler", "constant"),
    )
    min_lr_ratio: float = flag(
        0.1,
        "Lowest learning rate, as a share of the peak.",
        bounds="[0, 1]",
        only_if=given("lr_scheduler", *FLOORED_SCHEDULES),
    )
    l2: float = flag(0.0, "Decoupled weight decay, without biases and norms.", bounds=">= 0")
    adam_betas: tuple[float, float] = flag((0.9, 0.95), "Adam's beta1 and beta2.", bounds="[0, 1)")
    max_norm: float = flag(
        1.0, "Clip the global gradient norm to this; 0: no clipping.", bounds=">= 0"
    )
    max_nonfinite_steps: int = flag(
        5,
        "A step with a non-finite gradient is skipped and counted; after this many in a row the"
        " run saves the batch and stops. 0: stop at the first.",
        bounds=">= 0",
    )
