"""From flags to DeepSpeed's settings, and the check of --ds_config_overrides against the DeepSpeed
that is installed. The translation is a pure function, so that tests can check as data what each
flag turns on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from openrl.config.groups.deepspeed import DeepSpeedFlags
from openrl.errors import UserError
from openrl.flags.values import show, unknown_keys

KINDS = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    dict: "a JSON object",
}
REDUCE_BUCKET = 500_000_000  # number of gradients reduced at a time; DeepSpeed's own default


@dataclass(frozen=True)
class EngineFacts:
    """The facts besides flags that DeepSpeed's settings depend on."""

    trainable: int  # number of parameters that have a gradient, in this rank's module
    hidden_size: int
    dtype: str  # type of the parameters: bf16, fp16 or fp32
    device: str  # cpu or cuda
    ranks: int
    trained: bool
    max_norm: float = 0.0  # gradient norm that DeepSpeed clips to; 0: no clipping
    low_masters: bool = False
    """The optimizer steps on the bf16 parameters themselves. DeepSpeed has a mode for this in
    stages 1 to 3. In stage 0 it leaves the parameters alone if its settings name no type."""
    tp_size: int = 1  # ranks that split each layer
    streamed: bool = False  # not trained, with weights in host memory


def deepspeed_config(flags: DeepSpeedFlags, facts: EngineFacts) -> dict[str, Any]:
    """Return DeepSpeed's settings. They name one micro-batch per step, since ``DeepSpeedEngine``
    counts micro-batches itself.

    Raises UserError if --zpg does not divide the ranks. Earlier checks cannot, because the number
    of ranks may depend on the cluster."""
    if facts.trained and facts.ranks % flags.zpg:
        problem = f"--zpg {flags.zpg}: {facts.ranks} ranks do not divide evenly into such groups"
        raise UserError(problem, "--zpg 1")
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": facts.max_norm,
        "steps_per_print": None,
        # DeepSpeed accepts optimizers from a list of names, and on a CPU insists on its own Adam,
        # which every installation would have to compile. torch's fused Adam is as fast, and our
        # contract tests cover it.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero(flags, facts),
        **_types(flags, facts),
        **({"tensor_parallel": {"autotp_size": facts.tp_size}} if facts.tp_size > 1 else {}),
    }
    return merged(settings, flags.ds_config_overrides)


def check_device(dtype: str, device: str) -> None:
    """Raise UserError if DeepSpeed cannot train this type on this device."""
    if device == "cpu" and dtype == "fp16" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        raise UserError(
            "--param_dtype fp16: this CPU cannot compute in it", "--param_dtype bf16, or fp32"
        )


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings`` with its leaves replaced by those of ``changes``."""
    inner = {
        key: merged(settings[key], value)
        if isinstance(settings.get(key), Mapping) and isinstance(value, Mapping)
        else value
        for key, value in changes.items()
    }
    return {**settings, **inner}


def _zero(flags: DeepSpeedFlags, facts: EngineFacts) -> dict[str, Any]:
    on_host = {"device": "cpu", "pin_memory": facts.device == "cuda"}
    settings: dict[str, Any] = {
        "stage": flags.zero_stage,
        # DeepSpeed allocates the whole bucket up front, so it need not exceed all gradients.
        "reduce_bucket_size": min(REDUCE_BUCKET, facts.trainable),
        # Vectors stay whole on every rank and matrices are sharded, as with transformers' "auto".
        "stage3_param_persistence_threshold": 10 * facts.hidden_size,
        # only a backward pass gathers from these secondary copies
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
    """Return the type in which the gradients of micro-batches are accumulated."""
    return flags.grad_accum_dtype or ("bf16" if low_masters else "fp32")


def _types(flags: DeepSpeedFlags, facts: EngineFacts) -> dict[str, Any]:
    """Return the settings for the types of parameters and of accumulated gradients."""
    if (facts.low_masters and flags.zero_stage == 0) or facts.dtype == "fp32":
        return {}
    names = ["enabled"]
    if facts.dtype == "bf16":
        names.append("check_grad_overflow")
    if facts.low_masters:
        names += ["bf16_master_weights_and_grads", "bf16_optimizer_states"]
    settings: dict[str, Any] = {facts.dtype: dict.fromkeys(names, True)}
    if flags.zero_stage > 0:
        settings["data_types"] = {"grad_accum_dtype": grad_accum_dtype(flags, facts.low_masters)}
    return settings


class Section(dict[str, Any]):
    """Settings that note which names DeepSpeed reads, with its defaults: it ignores the names
    that it does not know. Nothing is noted of a section that DeepSpeed takes whole, by ``**``: its
    own class refuses what is unknown."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(
            {name: Section(v) if isinstance(v, dict) else v for name, v in settings.items()}
        )
        self.read: dict[str, Any] = {}

    def get(self, name: str, default: Any = None) -> Any:
        if self.read.get(name) is None:
            self.read[name] = default
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.read.setdefault(name)
        return super().__getitem__(name)


def check_overrides(flags: DeepSpeedFlags, dtype: str, device: str) -> None:
    """Raise UserError if DeepSpeed rejects or ignores something in --ds_config_overrides. This
    imports DeepSpeed, which takes seconds, but only if there is something to check."""
    overrides = flags.ds_config_overrides
    if not overrides:
        return
    os.environ["DS_ACCELERATOR"] = device  # DeepSpeed reads it when it is imported
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    facts = EngineFacts(
        trainable=1, hidden_size=1, dtype=dtype, device=device, ranks=flags.zpg, trained=True
    )
    settings, refusal = Section(deepspeed_config(flags, facts)), ""
    try:
        DeepSpeedConfig(settings)
    except (DeepSpeedConfigError, ValueError, AssertionError, TypeError, AttributeError) as error:
        refusal = f"DeepSpeed refuses it: {_in_words(error)}"
    # a wrong value is often what DeepSpeed stumbles over; then it has not read every name
    wrong = next(wrong_kinds(overrides, settings), "") or refusal
    if wrong := wrong or next(unknown_settings(overrides, settings), ""):
        raise UserError(f"--ds_config_overrides: {wrong}", "see deepspeed.ai/docs/config-json")


def wrong_kinds(overrides: Mapping[str, Any], section: Section, inside: str = "") -> Iterator[str]:
    """Yield a message for each value that is of another kind than DeepSpeed's default."""
    for name, value in overrides.items():
        kind = KINDS.get(type(section.read.get(name)))
        if isinstance(value, dict) and isinstance(inner := dict.get(section, name), Section):
            yield from wrong_kinds(value, inner, f"{inside}{name}.")
        elif kind and value is not None and KINDS.get(type(value)) != kind:
            yield f"{inside}{name}: expected {kind}, got {show(value)}"


def unknown_settings(
    overrides: Mapping[str, Any], section: Section, inside: str = ""
) -> Iterator[str]:
    """Yield a message for each name that DeepSpeed has not read."""
    unknown = unknown_keys(overrides, section.read) if section.read else ()
    for name, near in unknown:
        meant = f"; did you mean {near!r}?" if near else ""
        yield f"DeepSpeed has no setting {inside + name!r}{meant}"
    for name, value in overrides.items():
        if isinstance(inner := dict.get(section, name), Section):
            yield from unknown_settings(value, inner, f"{inside}{name}.")


def _in_words(error: Exception) -> str:
    """Return the message of an error in one line; pydantic's takes three lines for each field."""
    if callable(fields := getattr(error, "errors", None)):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in fields())
    return str(error)
