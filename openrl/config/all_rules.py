"""Importing this registers every rule that spans flags."""

from __future__ import annotations

from openrl.config.rules import (  # noqa: F401
    asynchrony,
    batches,
    deepspeed,
    engines,
    environment,
    inference,
    learning,
    lora,
    parallel,
    placement,
    rewards,
    sampling,
    selection,
    sleep,
    supervised,
)
