"""Flags of batches, DeepSpeed and optimizers."""

from __future__ import annotations

from typing import Any, Literal

from openrl.config.conditions import (
    LOGITS,
    SEVERAL_STEPS,
    SIBLINGS,
)
from openrl.config.derived import FLOORED_SCHEDULES
from openrl.flags.schema import absent, flag, given, group

Scheduler = Literal[
    "cosine_with_min_lr", "cosine", "linear", "constant", "constant_with_warmup", "inverse_sqrt",
    "polynomial", "cosine_with_restarts", "warmup_stable_decay",
]  # fmt: skip
OptimizerName = Literal["adamw", "adamw_bf16", "adamw_8bit", "muon"]


@group("Batch")
class RolloutBatchFlags:
    rollout_batch_size: int = flag(
        1024, "Prompts per step; a step has this * n_samples_per_prompt samples.", bounds="> 0"
    )
    n_samples_per_prompt: int = flag(
        1, "Responses generated for each prompt: the group size.", bounds="> 0"
    )
    train_batch_size: int = flag(
        128, "Samples (not prompts) per optimizer step, over all ranks.", bounds="> 0"
    )
    micro_train_batch_size: int = flag(
        4,
        "Samples per rank in one forward and backward pass.",
        bounds="> 0",
        only_if=absent("use_dynamic_batch"),
    )
    micro_rollout_batch_size: int = flag(
        8,
        "Samples per rank in forward-only passes.",
        bounds="> 0",
        only_if=absent("use_dynamic_batch"),
    )
    num_episodes: int = flag(
        1, "Passes over the prompts.", bounds="> 0", only_if=absent("eval_only")
    )
    max_epochs: int = flag(1, "Passes over each rollout batch, for actor and critic.", bounds="> 0")
    shuffle_mini_batch: bool = flag(
        True,
        "On each pass, shuffle a rollout's samples before splitting them into optimizer steps."
        " Off: keep the data's order.",
        only_if=SEVERAL_STEPS,
    )
    max_steps: int = flag(
        -1,
        "Stop after this many steps; the learning-rate schedule ends there too. -1: set by"
        " --num_episodes.",
        bounds="-1 or > 0",
        only_if=absent("eval_only"),
    )


@group("Batch")
class SupervisedBatchFlags:
    train_batch_size: int = flag(
        128, "Rows, or pairs, per optimizer step over all ranks.", bounds="> 0"
    )
    micro_train_batch_size: int = flag(
        8,
        "Rows, or pairs, per rank in one forward and backward pass.",
        bounds="> 0",
        only_if=absent("use_dynamic_batch"),
    )
    max_epochs: int = flag(2, "Passes over the data.", bounds="> 0")
    max_steps: int = flag(
        -1,
        "Stop after this many optimizer steps; the schedule ends there too. -1: set by"
        " --max_epochs.",
        bounds="-1 or > 0",
    )


@group("Batch")
class PackingFlags:
    packing_samples: bool = flag(
        False,
        "Run each micro-batch as one row without padding; attention never crosses samples. Needs"
        " a model that mixes tokens by attention only.",
    )


@group("Batch")
class SharedPackingFlags(PackingFlags):
    prefix_grouper: bool = flag(
        False,
        "Compute the common prefix of a prompt's samples (the prompt or more) once per"
        " micro-batch, forward and backward: the same gradient from fewer tokens. Turns on"
        " --packing_samples and uses --attn_implementation varlen.",
        only_if=SIBLINGS,
    )


@group("Batch", only_if=given("use_dynamic_batch"))
class DynamicBatchFlags:
    use_dynamic_batch: bool = flag(
        False,
        "Size micro-batches by tokens instead of samples, and distribute the rows of an optimizer"
        " step over ranks by cost. Turns on --packing_samples.",
    )
    train_max_tokens_per_gpu: int = flag(
        16384,
        "Most tokens per rank in one forward and backward pass, never exceeded.",
        bounds="> 0",
    )


@group("Batch", only_if=given("use_dynamic_batch"))
class RolloutDynamicBatchFlags(DynamicBatchFlags):
    rollout_max_tokens_per_gpu: int | None = flag(
        None,
        "Most tokens per rank in one forward-only pass. None: train_max_tokens_per_gpu.",
        bounds="> 0",
    )


@group("DeepSpeed", only_if=given("gradient_checkpointing"))
class RecomputeFlags:
    gradient_checkpointing: bool = flag(
        False, "Recompute activations in the backward pass instead of keeping them."
    )
    gradient_checkpointing_method: Literal["uniform", "block", "selective", "moe"] = flag(
        "uniform",
        "What to recompute. uniform: every layer; block: only the first layers; selective: only"
        " attention; moe: only expert blocks.",
    )
    gradient_checkpointing_num_layers: int | None = flag(
        None,
        "Layers that block recomputes. None: all.",
        bounds="> 0",
        only_if=given("gradient_checkpointing_method", "block"),
    )
    gradient_checkpointing_use_reentrant: bool = flag(
        False,
        "Recompute with torch's older, reentrant implementation, which handles whole layers only.",
    )


@group("DeepSpeed")
class DeepSpeedFlags(RecomputeFlags):
    zero_stage: Literal[0, 1, 2, 3] = flag(
        2, "ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also parameters."
    )
    logits_chunk_size: int = flag(
        1024,
        "Compute log-probs in chunks of this many tokens, so that full logits never exist. 0: all"
        " at once.",
        bounds=">= 0",
        only_if=LOGITS,
    )
    adam_offload: bool = flag(
        False,
        "Keep master weights, accumulated gradients and Adam's moments in host memory, and run"
        " its step on the CPU.",
    )
    param_offload: bool = flag(
        False,
        "Keep trained parameters in host memory and fetch them layer by layer. Needs --zero_stage"
        " 3.",
    )
    overlap_comm: bool | None = flag(
        None,
        "Reduce gradients during the backward pass, which needs more buffers. None: only in stage"
        " 3, as in DeepSpeed.",
        only_if=absent("zero_stage", 0),
    )
    zpg: int = flag(
        1,
        "Ranks, such as those of one node, that share a whole copy of the parameters, from which"
        " the backward pass gathers (ZeRO++ hpZ). 1: off. Needs --zero_stage 3.",
        bounds="> 0",
    )
    grad_accum_dtype: Literal["bf16", "fp16", "fp32"] | None = flag(
        None,
        "Type in which the gradients of micro-batches are summed. None: fp32, or bf16 with"
        " --optimizer adamw_bf16.",
    )
    ds_config_overrides: dict[str, Any] = flag(
        {},
        'Other DeepSpeed settings, merged last, e.g. {"zero_optimization": {"reduce_bucket_size":'
        " 5e7}}.",
    )
    dist_timeout: int = flag(
        1800, "Seconds that a collective may take before its process group aborts.", bounds="> 0"
    )


@group("Optimizer")
class LearningRateFlags:
    """Appears once per trained role, with its prefix: actor_, critic_, or none if one model is
    trained."""

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
