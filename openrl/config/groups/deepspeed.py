"""Flags of training with DeepSpeed, and of ranks that split sequences or layers."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from openrl.config.conditions import LOGITS, RING
from openrl.flags.schema import absent, flag, given, group
from openrl.flags.values import SECONDS

RECOMPUTES = given("gradient_checkpointing")
recomputes = partial(flag, only_if=RECOMPUTES)


@group("DeepSpeed")
class DeepSpeedFlags:
    gradient_checkpointing: bool = recomputes(
        False, "Recompute activations in the backward pass instead of keeping them."
    )
    gradient_checkpointing_method: Literal["uniform", "block", "selective", "moe"] = recomputes(
        "uniform",
        "What to recompute. uniform: every layer; block: only the first layers; selective: only"
        " attention; moe: only expert blocks.",
    )
    gradient_checkpointing_num_layers: int | None = flag(
        None,
        "Layers that block recomputes. None: all.",
        bounds="> 0",
        only_if=(RECOMPUTES, given("gradient_checkpointing_method", "block")),
    )
    gradient_checkpointing_use_reentrant: bool = recomputes(
        False,
        "Recompute with torch's older, reentrant implementation, which handles whole layers only.",
    )
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
        1800, "Seconds that a collective may take before its process group aborts.", bounds=SECONDS
    )


@group("DeepSpeed")
class ParallelFlags:
    ulysses_size: int = flag(
        1,
        "Ranks that split each sequence and exchange attention heads by all-to-all (Ulysses).",
        bounds="> 0",
    )
    ring_attn_size: int = flag(
        1,
        "Ranks that split each sequence and pass keys and values around (ring attention). Turns"
        " on --packing_samples.",
        bounds="> 0",
    )
    ring_head_stride: int = flag(
        1,
        "Key-value heads per round of the ring; more are faster but need more memory.",
        bounds="> 0",
        only_if=RING,
    )
    ds_tensor_parallel_size: int = flag(
        1,
        "Ranks that split each layer in training (DeepSpeed AutoTP). Needs bf16 or fp16 and ZeRO"
        " 1 or 2.",
        bounds="> 0",
    )

    @property
    def sequence_size(self) -> int:
        """How many ranks hold one sequence together."""
        return self.ulysses_size * self.ring_attn_size

    @property
    def ranks_per_shard(self) -> int:
        """How many ranks get the same rows."""
        return self.sequence_size * self.ds_tensor_parallel_size
