"""From flags to DeepSpeed's own settings: a pure function, so that what a flag turns on is tested as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openrl.config.learning import DeepSpeedFlags

REDUCE_BUCKET = 500_000_000  # gradients reduced at a time, DeepSpeed's own default


@dataclass(frozen=True)
class EngineFacts:
    """What DeepSpeed's settings depend on besides flags."""

    parameters: int  # of this rank's module
    hidden_size: int
    dtype: str  # bf16, fp16 or fp32: of the parameters
    max_norm: float = 0.0  # gradient norm that DeepSpeed clips to; 0: it does not clip
    low_masters: bool = False
    """The optimizer steps on the bf16 parameters themselves. DeepSpeed has a mode for that in stages 1 to 3; in stage 0
    it leaves parameters as they are when it is told of no type."""


def deepspeed_config(flags: DeepSpeedFlags, facts: EngineFacts) -> dict[str, Any]:
    """DeepSpeed's settings. Micro-batches are counted by the engine around it, so here there is one per step."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": facts.max_norm,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,  # DeepSpeed's list is one of names; the contract tests are ours
        "zero_optimization": _zero(flags, facts),
        **_types(flags, facts),
    }


def _zero(flags: DeepSpeedFlags, facts: EngineFacts) -> dict[str, Any]:
    return {
        "stage": flags.zero_stage,
        # Memory that is set aside whole: no more than there are gradients.
        "reduce_bucket_size": min(REDUCE_BUCKET, facts.parameters),
        # Vectors stay whole on every rank, matrices are sharded; as transformers' "auto".
        "stage3_param_persistence_threshold": 10 * facts.hidden_size,
    }


def _types(flags: DeepSpeedFlags, facts: EngineFacts) -> dict[str, Any]:
    """Of parameters, and of gradients while micro-batches are added up."""
    sharded = flags.zero_stage > 0
    if facts.low_masters:
        names = ("enabled", "check_grad_overflow", "bf16_master_weights_and_grads", "bf16_optimizer_states")
        settings = {"bf16": dict.fromkeys(names, True), "data_types": {"grad_accum_dtype": "bf16"}}
        return settings if sharded else {}
    if facts.dtype == "fp32":
        return {}
    settings = {facts.dtype: {"enabled": True} | ({"check_grad_overflow": True} if facts.dtype == "bf16" else {})}
    return settings | ({"data_types": {"grad_accum_dtype": "fp32"}} if sharded else {})
