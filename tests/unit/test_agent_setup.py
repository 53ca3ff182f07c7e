"""From flags to the agent that plays: every kind, and what is refused before anything starts."""

import asyncio
from pathlib import Path

import pytest

from openrl.agents.build import AgentSetup, open_agent
from openrl.agents.checks import check_agents
from openrl.config.agents import AgentFlags, EnvironmentFlags
from openrl.config.data import TemplateFlags
from openrl.errors import UserError
from openrl.types import Prompt, Sampling
from tests.chat_templates import FAMILIES, tokenizer_of
from tests.scripted_policy import ScriptedPolicy

EXAMPLES = Path(__file__).parents[2] / "examples/python/agents"
QUESTION = Prompt(
    "train:0", [], "2 + 2?", label="4", messages=({"role": "user", "content": "2 + 2?"},)
)
