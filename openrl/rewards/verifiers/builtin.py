"""The built-in verifiers: importing this module registers them all. It loads the standard library
only."""

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
