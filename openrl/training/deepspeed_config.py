"""From flags to DeepSpeed's own settings: a pure function, so that what a flag turns on is tested
as data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from openrl.config.learning import DeepSpeedFlags
from openrl.errors import UserError

REDUCE_BUCKET = 500_000_000  # gradients reduced at a time, DeepSpeed's own default


@dataclass(frozen=True)
class EngineFacts:
    """What DeepSpeed's settings depend on besides flags."""

    parameters: int  # of this rank's module
    hidden_size: int
    dtype: str  # bf16, fp16 or fp32: of the parameters
    device: str  # cpu or cuda
    ranks: int
    trained: bool
    max_norm: float = 0.0  # gradient norm that DeepSpeed clips to; 0: it does not clip
    low_masters: bool = False
    """The optimizer steps on the bf16 parameters themselves. DeepSpeed has a mode for that in
    stages 1 to 3; in stage 0 it leaves parameters as they are when it is told of no type."""
    tp_size: int = 1  # ranks that split each layer
    streamed: bool = False  # not trained, and its weights wait in host memory


def deepspeed_config(flags: DeepSpeedFlags, facts: EngineFacts) -> dict[str, Any]:
    """DeepSpeed's settings. Micro-batches are counted by the engine around it, so here there is one
    per step.

    Raises UserError if --zpg does not divide the ranks, whose number only the cluster may have
    known."""
    if facts.trained and facts.ranks % flags.zpg:
        raise UserError(
            f"--zpg {flags.zpg}: {facts.ranks} ranks do not divide into such groups", "--zpg 1"
        )
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": facts.max_norm,
        "steps_per_print": None,
        # DeepSpeed knows optimizers by name, and wants its own Adam on a CPU, which each
        # installation would have to compile; torch's fused one is as fast. The contract tests are
        # ours.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero(flags, facts),
        **_types(flags, facts),
        **({"tensor_parallel": {"autotp_size": facts.tp_size}} if facts.tp_size > 1 else {}),
    }
    return merged(settings, flags.ds_config_overrides)


def check_device(dtype: str, device: str) -> None:
    """Raises UserError if DeepSpeed does not train this type on this device."""
    if device == "cpu" and dtype == "fp16" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        raise UserError(
            "--param_dtype fp16: this CPU has no arithmetic in it", "--param_dtype bf16, or fp32"
        )


def check_overrides(flags: DeepSpeedFlags, dtype: str, device: str) -> None:
    """Raises UserError for what --ds_config_overrides asks of a section of settings that has no
    such field. Imports DeepSpeed, which takes seconds, if there is something to check."""
    if not flags.ds_config_overrides:
        return
    os.environ["DS_ACCELERATOR"] = device  # read when it is imported
    from deepspeed.runtime.config import DeepSpeedConfig

    facts = EngineFacts(
        parameters=1, hidden_size=1, dtype=dtype, device=device, ranks=flags.zpg, trained=True
    )
    try:
        DeepSpeedConfig(deepspeed_config(flags, facts))
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"--ds_config_overrides: DeepSpeed refuses it: {error}",
            "see deepspeed.ai/docs/config-json",
        ) from error


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` with the leaves of ``changes`` in the place of their own."""
    inner = {
        key: merged(settings[key], value) if isinstance(settings.get(key), Mapping) else value
        for key, value in changes.items()
    }
    return {**settings, **inner}


def _zero(flags: DeepSpeedFlags, facts: EngineFacts) -> dict[str, Any]:
    on_host = {"device": "cpu", "pin_memory": facts.device == "cuda"}
    settings: dict[str, Any] = {
        "stage": flags.zero_stage,
        # Memory that is set aside whole: no more than there are gradients.
        "reduce_bucket_size": min(REDUCE_BUCKET, facts.parameters),
        # Vectors stay whole on every rank, matrices are sharded; as transformers' "auto".
        "stage3_param_persistence_threshold": 10 * facts.hidden_size,
        # only a backward pass gathers from the copies
        "zero_hpz_partition_size": flags.zpg if facts.trained else 1,
    }
    if flags.overlap_comm is not None:
        settings["overlap_comm"] = flags.overlap_comm
    if facts.trained and flags.adam_offload:
        settings["offload_optimizer"] = on_host
    if flags.param_offload if facts.trained else facts.streamed:
        settings["offload_param"] = on_host
    return settings


def grad_accum_dtype(flags: DeepSpeedFlags, low_masters: bool) -> str:
    """The type in which micro-batches' gradients add up."""
    return flags.grad_accum_dtype or ("bf16" if low_masters else "fp32")


def _types(flags: DeepSpeedFlags, facts: EngineFacts) -> dict[str, Any]:
    """Of parameters, and of gradients while micro-batches are added up."""
    sharded = flags.zero_stage > 0
    sums = (
        {"data_types": {"grad_accum_dtype": grad_accum_dtype(flags, facts.low_masters)}}
        if sharded
        else {}
    )
    if facts.low_masters:
        names = (
            "enabled",
            "check_grad_overflow",
            "bf16_master_weights_and_grads",
            "bf16_optimizer_states",
        )
        return {"bf16": dict.fromkeys(names, True), **sums} if sharded else {}
    if facts.dtype == "fp32":
        return {}
    return {
        facts.dtype: (
            {"enabled": True} | ({"check_grad_overflow": True} if facts.dtype == "bf16" else {})
        ),
        **sums,
    }
