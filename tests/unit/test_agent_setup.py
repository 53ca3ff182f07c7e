"""From flags to the agent that plays: every kind, and what is refused before anything starts."""

from pathlib import Path

from openrl.types import Prompt

EXAMPLES = Path(__file__).parents[2] / "examples/python/agents"
QUESTION = Prompt(
    "train:0", [], "2 + 2?", label="4", messages=({"role": "user", "content": "2 + 2?"},)
)
