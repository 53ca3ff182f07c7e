"""The built-in verifiers. Importing this module registers all of them, and loads no third-party
library."""

# ruff: noqa: F401
from openrl.rewards.verifiers import (
    countdown,
    dapo,
    expressions,
    layout,
    length,
    llm_judge,
    match,
    numeric,
    programs,
    reasoning,
)
