"""Importing this module registers every rule, and what is known of unknown flags."""

from __future__ import annotations

from openrl.config import unknown_flags  # noqa: F401
from openrl.config.rules import (  # noqa: F401
    agent,
    algorithm,
    asynchrony,
    batch,
    data,
    deepspeed,
    inference,
    logging,
    machine,
    model,
    placement,
    reward,
    rollout_correction,
    rollout_engine,
    sampling,
    vision,
)
