"""Rules of adapters and 4-bit weights."""

from __future__ import annotations

import re
from collections.abc import Iterator

from openrl.config.commands import TRAINING, PPOConfig, SupervisedConfig
from openrl.flags.checks import Problem, check


@check(*TRAINING)
def excluded_modules_can_be_matched(
    config: PPOConfig | SupervisedConfig, given: frozenset[str]
) -> Iterator[Problem]:
    pattern = config.lora.lora_exclude_modules
    if pattern is None:
        return
    try:
        re.compile(pattern)
    except re.error as error:
        message = f"{pattern!r} is no regular expression: {error}"
        yield Problem(("lora_exclude_modules",), message, "'.*\\.(k|v)_proj'")


@check(*TRAINING)
def packed_weights_carry_adapters(
    config: PPOConfig | SupervisedConfig, given: frozenset[str]
) -> Iterator[Problem]:
    if not config.lora.load_in_4bit:
        return
    if not config.lora.adapts:
        yield Problem(
            ("load_in_4bit", "lora_rank"),
            "4-bit weights cannot be trained themselves",
            "--lora_rank 16",
        )
    if config.model.param_dtype != "bf16":
        yield Problem(
            ("load_in_4bit", "param_dtype"), "4-bit weights compute in bf16", "--param_dtype bf16"
        )
    if config.deepspeed.zero_stage == 3:
        yield Problem(
            ("load_in_4bit", "zero_stage"),
            "stage 3 shards weights without what unpacks 4-bit ones",
            "--zero_stage 2: 4-bit weights are small, and only adapters have states to shard",
        )
