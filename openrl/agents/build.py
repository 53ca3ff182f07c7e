"""From flags to the agent that plays the episodes of one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrl.agents.base import Agent, Environment, TurnLimits
from openrl.agents.chat import ChatFormat
from openrl.agents.endpoint.command import AT_ONCE, AgentCommand
from openrl.agents.endpoint.server import serve
from openrl.agents.endpoint.session import Play
from openrl.agents.environment_agent import EnvironmentAgent
from openrl.agents.gym import make_environment
from openrl.agents.single_turn import SingleTurn
from openrl.agents.tools.calls import ParsedReply
from openrl.agents.tools.parsers import Parse, parser_for
from openrl.config.agents import AgentFlags, EnvironmentTagFlags, TurnFlags, read_env_config
from openrl.config.data import TemplateFlags
from openrl.errors import UserError
from openrl.types import Prompt


@dataclass(frozen=True)
class AgentSetup:
    """What is told to those who start agents."""

    flags: AgentFlags
    environments: EnvironmentTagFlags
    templates: TemplateFlags


@asynccontextmanager
async def open_agent(
    setup: AgentSetup, tokenizer: PreTrainedTokenizerBase, rank: int = 0
) -> AsyncIterator[Agent]:
    """The agent of the engine ``rank``; processes and servers that it has end with the context."""
    flags, templates = setup.flags, setup.templates
    chat = ChatFormat(
        tokenizer, chat=templates.apply_chat_template, kwargs=templates.chat_template_kwargs
    )
    limits, rows = turn_limits(flags), flags.agent_sample_unit == "step"
    if flags.agent_command is not None:
        play = Play(chat, call_parser(flags, tokenizer), limits, rows)
        port = flags.agent_endpoint_port and flags.agent_endpoint_port + rank
        async with serve(play, port) as endpoint:
            yield AgentCommand(flags.agent_command, endpoint, flags.env_max_concurrency or AT_ONCE)
    elif setup.environments.env_tags:
        settings = environment_settings(setup.environments)

        def make(prompt: Prompt) -> Environment:
            return make_environment(prompt.source, settings.get(prompt.source, {}))

        yield EnvironmentAgent(make, chat, limits, rows)
    else:
        yield SingleTurn(tokenizer.decode)


def call_parser(flags: AgentFlags, tokenizer: PreTrainedTokenizerBase) -> Parse:
    """Of --tool_parser, else of the chat template; one that writes no calls has none to read."""
    try:
        return parser_for(flags.tool_parser, tokenizer.chat_template)
    except UserError:
        if flags.tool_parser is not None:
            raise
        return lambda text, schemas: ParsedReply(text)


def turn_limits(flags: TurnFlags) -> TurnLimits:
    return TurnLimits(
        max_turns=flags.max_turns,
        max_tokens_per_turn=flags.max_tokens_per_turn,
        step_timeout=flags.env_step_timeout,
        turn_timeout=flags.turn_timeout,
        episode_timeout=flags.episode_timeout,
    )


def environment_settings(flags: EnvironmentTagFlags) -> dict[str, dict[str, Any]]:
    """--env_config, by tag."""
    return read_env_config(flags.env_config, flags.env_tags) if flags.env_config else {}


def check_environments(flags: EnvironmentTagFlags) -> None:
    """Raises UserError for settings that an environment does not know."""
    settings = environment_settings(flags)
    for tag in flags.env_tags:
        make_environment(tag, settings.get(tag, {}))
