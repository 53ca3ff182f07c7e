"""The built-in verifiers. Importing this module registers all of them, and loads no library but
the standard one."""

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
