"""What can be known of agents before anything starts."""

from __future__ import annotations

import asyncio

from transformers import PreTrainedTokenizerBase

from openrl.agents.build import AgentSetup, environment_maker, play_of
from openrl.agents.chat import Schemas
from openrl.agents.foreign.build import agent_file, recognise
from openrl.agents.probe import probe, require_tools
from openrl.agents.tools.build import open_toolbox
from openrl.agents.tools.parsers import parser_for
from openrl.errors import UserError

REWARDING = ("executor", "turns", "gym", "skyrl")  # kinds of files that return rewards


def check_agents(
    setup: AgentSetup, tokenizer: PreTrainedTokenizerBase, source: str | None
) -> list[str]:
    """What the chat template makes of several turns, in sentences. ``source`` is the flag of a
    source of rewards, if there is one.

    Loads the file of an agent in a process, and the tools. Raises UserError for what cannot be
    played."""
    flags, chat, schemas = setup.flags, play_of(setup, tokenizer).chat, None
    if setup.environments.env_tags:
        environment_maker(setup.environments)
    if flags.tools is not None:
        parser_for(flags.tool_parser, tokenizer.chat_template)
        schemas = asyncio.run(_schemas(flags.tools, flags.env_step_timeout))
        require_tools(chat, schemas)
    if flags.agent_func_path is not None and ":" not in flags.agent_func_path.partition(".py")[0]:
        check_file(setup, source)
    plays = flags.agent_command or flags.agent_func_path or schemas or setup.environments.env_tags
    return probe(chat, schemas) if plays else []


def check_file(setup: AgentSetup, source: str | None) -> None:
    """Raises UserError as ``recognise``, and for a class that this run cannot play."""
    file = agent_file(str(setup.flags.agent_func_path))
    facts = recognise(file)
    if facts.kind == "program" and not setup.flags.agent_endpoint:
        raise UserError(f"{file}: {facts.class_name} speaks to a chat endpoint", "--agent_endpoint")
    if facts.kind in REWARDING and source is not None:
        raise UserError(
            f"{file}: {facts.class_name} returns rewards, and --{source} gives others",
            f"leave --{source} out",
        )


async def _schemas(tools: str, timeout: float) -> Schemas:
    make = await open_toolbox(tools, timeout)
    return make().schemas
