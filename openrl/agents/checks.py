"""What can be known of agents before anything starts."""

from __future__ import annotations

import asyncio

from transformers import PreTrainedTokenizerBase

from openrl.agents.build import OPENENV, AgentSetup, environment_maker, play_of
from openrl.agents.chat import ChatFormat, Schemas
from openrl.agents.foreign.build import agent_file, recognise
from openrl.agents.openenv.environment import ActionReader
from openrl.agents.openenv.wire import find_server
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
    given = flags.agent_func_path
    if given is not None and given.startswith(OPENENV):
        check_openenv(given.removeprefix(OPENENV), source)
    elif given is not None and ":" not in given.partition(".py")[0]:
        schemas = check_file(setup, chat, source) or schemas
    plays = flags.agent_command or flags.agent_func_path or schemas or setup.environments.env_tags
    return probe(chat, schemas) if plays else []


def check_openenv(url: str, source: str | None) -> None:
    """Raises UserError if no server of environments is there, or its actions cannot be written."""
    ActionReader.of(asyncio.run(find_server(url)).action)
    if source is not None:
        message = f"openenv: environments give the rewards, and --{source} gives others"
        raise UserError(message, f"leave --{source} out")


def check_file(setup: AgentSetup, chat: ChatFormat, source: str | None) -> Schemas:
    """The tools that the file brings. Raises UserError as ``recognise``, and for a class that this
    run cannot play."""
    flags, file = setup.flags, agent_file(str(setup.flags.agent_func_path))
    facts = recognise(file)
    if facts.kind == "trl":
        parser_for(flags.tool_parser, chat.tokenizer.chat_template)
        require_tools(chat, facts.schemas)
    if facts.kind == "executor" and flags.agent_sample_unit == "step":
        message = f"{file}: {facts.class_name} makes the training rows itself"
        raise UserError(message, "--agent_sample_unit trajectory")
    if facts.kind == "program" and not flags.agent_endpoint:
        raise UserError(f"{file}: {facts.class_name} speaks to a chat endpoint", "--agent_endpoint")
    if facts.kind in REWARDING and source is not None:
        raise UserError(
            f"{file}: {facts.class_name} returns rewards, and --{source} gives others",
            f"leave --{source} out",
        )
    return facts.schemas


async def _schemas(tools: str, timeout: float) -> Schemas:
    make = await open_toolbox(tools, timeout)
    return make().schemas
