"""Importing this module registers every rule that spans flags, and what is known of foreign
flags."""

from __future__ import annotations

from openrl.config import foreign  # noqa: F401
from openrl.config.rules import (  # noqa: F401
    agents,
    algorithm,
    asynchrony,
    batches,
    data,
    deepspeed,
    engines,
    environment,
    inference,
    logging,
    model,
    parallel,
    placement,
    replay,
    rewards,
    sampling,
    selection,
    sleep,
    supervised,
    vision,
)
