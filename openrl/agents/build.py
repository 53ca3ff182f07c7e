"""From flags to the agent that plays the episodes of one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from openrl.agents.base import Agent
from openrl.agents.single_turn import SingleTurn
from openrl.config.agents import AgentFlags, EnvironmentFlags
from openrl.config.data import TemplateFlags


@dataclass(frozen=True)
class AgentSetup:
    """What is told to those who start agents."""

    flags: AgentFlags
    environments: EnvironmentFlags
    templates: TemplateFlags


@asynccontextmanager
async def open_agent(
    setup: AgentSetup, tokenizer: PreTrainedTokenizerBase, rank: int
) -> AsyncIterator[Agent]:
    """The agent of the engine ``rank``; processes and servers that it has end with the context."""
    yield SingleTurn(tokenizer.decode)
