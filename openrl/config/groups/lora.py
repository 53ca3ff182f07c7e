"""Flags of adapters and 4-bit weights."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from openrl.config.groups.model import scalar_head
from openrl.flags.schema import REQUIRED, absent, flag, given, group

ADAPTERS = given("lora_rank") | given("lora_adapter_path")


@group("LoRA")
class QuantizationFlags:
    load_in_4bit: bool = flag(False, "Load the base weights in 4-bit NF4 (bitsandbytes).")


of_adapter = partial(flag, only_if=(absent("lora_adapter_path"), given("lora_rank")))


@group("LoRA")
class LoRAFlags(QuantizationFlags):
    lora_alpha: int = of_adapter(
        16, "LoRA scale; updates are multiplied by alpha/rank.", bounds="> 0"
    )
    lora_dropout: float = of_adapter(0.0, "Dropout before the adapters.", bounds="[0, 1)")
    target_modules: tuple[str, ...] = of_adapter(
        ("all-linear",),
        "Module names that get adapters; all-linear: every linear layer except the head and those"
        " of Mamba that its kernels read past an adapter. Experts of a mixture never get any.",
    )
    lora_exclude_modules: str | None = of_adapter(
        None, "Regular expression of modules without adapters."
    )
    lora_rank: int = flag(
        0,
        "Rank of LoRA adapters; 0: train all weights.",
        bounds="[0, 8192]",
        only_if=absent("lora_adapter_path"),
    )
    lora_adapter_path: str | None = flag(
        None, "Adapter to start from; rank, scale and targets come from it."
    )

    @property
    def adapts(self) -> bool:
        """Whether adapters are trained while the base is frozen."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None

    @property
    def rank(self) -> int:
        """--lora_rank, or the rank of the adapter to start from; 0 means no adapters."""
        if self.lora_adapter_path is None:
            return self.lora_rank
        path = Path(self.lora_adapter_path).expanduser() / "adapter_config.json"
        # an adapter on the Hub counts as rank 16; peft reads the true rank when it loads it
        return json.loads(path.read_text())["r"] if path.is_file() else 16

    @property
    def of_critic(self) -> LoRAFlags:
        """The flags of a critic, whose adapter is a fresh one of the same rank."""
        return replace(self, lora_rank=self.rank, lora_adapter_path=None)  # type: ignore[type-var]


@group("LoRA")
class PolicyLoRAFlags(LoRAFlags):
    lora_sync: Literal["merge", "adapter"] = flag(
        "merge",
        "What a sync sends to engines: the merged weights, or only the adapter, which vLLM"
        " applies as a LoRA.",
        only_if=ADAPTERS,
    )


@group("LoRA")
class MergeFlags:
    value_head_prefix: str = scalar_head(only_if=given("is_rm"))
    model_path: str = flag(REQUIRED, "Base model: Hugging Face name or local directory.")
    lora_path: str = flag(REQUIRED, "Directory of the adapter, as peft saves it.")
    output_path: str = flag(REQUIRED, "Directory for the merged model; it must be new or empty.")
    is_rm: bool = flag(
        False,
        "The base is a reward model. The merged model gets the adapter's head if it has one, else"
        " the base's.",
    )
