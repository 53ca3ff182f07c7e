"""Rules about how models are loaded: attention, adapters, 4-bit weights."""

from __future__ import annotations

import re

from openrl.config.commands import ServeConfig, TrainingConfig
from openrl.flags.checks import Problems, check, problem


@check
def attention_fits(config: TrainingConfig) -> Problems:
    name, fix = config.model.attn_implementation or "", "--attn_implementation sdpa"
    if name.startswith("flash_attention") and config.model.param_dtype == "fp32":
        yield problem(("attn_implementation", "param_dtype"), f"{name} does not support fp32", fix)
    if name.startswith("flash_attention") and config.device.device == "cpu":
        yield problem(("attn_implementation", "device"), f"{name} needs a GPU", fix)


@check
def patterns_can_be_matched(config: TrainingConfig) -> Problems:
    patterns = {
        "lora_exclude_modules": (config.lora.lora_exclude_modules, "'.*\\.(k|v)_proj'"),
        "freeze_modules": (config.changes.freeze_modules, "'embed_tokens|layers\\.0\\.'"),
    }
    for flag, (pattern, example) in patterns.items():
        try:
            re.compile(pattern or "")
        except re.error as error:
            yield problem((flag,), f"{pattern!r} is not a regular expression: {error}", example)


@check
def packed_weights_compute_in_bf16(config: TrainingConfig | ServeConfig) -> Problems:
    weights = config.weights if isinstance(config, ServeConfig) else config.lora
    if weights.load_in_4bit and config.model.param_dtype != "bf16":
        message = "4-bit weights need bf16"
        yield problem(("load_in_4bit", "param_dtype"), message, "--param_dtype bf16")


@check
def packed_weights_carry_adapters(config: TrainingConfig) -> Problems:
    if config.lora.load_in_4bit and not config.lora.adapts:
        message = "4-bit weights can be trained only through adapters"
        yield problem(("load_in_4bit", "lora_rank"), message, "--lora_rank 16")
    if config.lora.load_in_4bit and config.deepspeed.zero_stage == 3:
        message = "stage 3 shards weights without the data that unpacks 4-bit weights"
        fix = "--zero_stage 2: 4-bit weights are small, and only adapters have states to shard"
        yield problem(("load_in_4bit", "zero_stage"), message, fix)
