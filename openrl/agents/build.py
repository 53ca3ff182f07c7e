"""Builds, from flags, the agent that plays the episodes of one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from openrl.agents.base import Agent
from openrl.agents.chat import ChatFormat
from openrl.agents.command_agent import AgentCommand
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.endpoint.server import serve
from openrl.agents.environments.tags import open_tag_agent
from openrl.agents.foreign.build import agent_file, open_file_agent
from openrl.agents.openenv import OpenEnvAgent, find_server
from openrl.agents.single_turn import SingleTurn
from openrl.agents.tools.agent import ToolAgent
from openrl.agents.tools.build import open_toolbox
from openrl.agents.tools.calls import parse_no_calls
from openrl.agents.tools.parsers import detect, parser_for
from openrl.agents.verifiers import open_verifiers
from openrl.config.groups.agent import AgentFlags, EnvironmentTagFlags
from openrl.config.groups.data import TemplateFlags
from openrl.config.groups.vision import ImageFlags
from openrl.data.images import RowImages

PROGRAM_TIMEOUT = 3600.0  # seconds for an episode that is played elsewhere, perhaps forever


@dataclass(frozen=True)
class AgentSetup:
    """What a process needs to know to build its agent."""

    flags: AgentFlags
    environments: EnvironmentTagFlags
    templates: TemplateFlags
    vision: ImageFlags = ImageFlags()
    plugins: tuple[str, ...] = ()  # modules that register environments


@asynccontextmanager
async def open_agent(
    setup: AgentSetup,
    tokenizer: PreTrainedTokenizerBase,
    rank: int = 0,
    images: RowImages | None = None,
) -> AsyncIterator[Agent]:
    """Open the agent of the engine ``rank``. Its processes and servers end with the context.
    Without ``images``, conversations hold only text."""
    flags, play = setup.flags, play_settings(setup, tokenizer, images)
    kind, address = flags.server
    port = flags.agent_endpoint_port and flags.agent_endpoint_port + rank  # 0: any free one
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        if flags.agent_command is not None:
            yield AgentCommand(flags.agent_command, await enter(serve(play, port)))
        elif kind == "openenv":
            yield OpenEnvAgent(await find_server(address), play)
        elif kind == "verifiers":
            yield await enter(open_verifiers(address, await enter(serve(play, port))))
        elif flags.agent_func_path is not None:
            endpoint = await enter(serve(play, port)) if flags.agent_endpoint else None
            file = agent_file(flags.agent_func_path)
            yield await enter(open_file_agent(file, play, endpoint))
        elif setup.environments.env_tags:
            yield await enter(open_tag_agent(setup.environments, setup.plugins, play))
        elif flags.tools is not None:
            toolbox = await open_toolbox(flags.tools, flags.env_step_timeout)
            yield ToolAgent(toolbox, play)
        else:
            yield SingleTurn(tokenizer.decode)


def play_settings(
    setup: AgentSetup, tokenizer: PreTrainedTokenizerBase, images: RowImages | None = None
) -> EpisodeConfig:
    """Return how the flags want episodes to be played. Raises UserError for an unknown
    --tool_parser."""
    flags, templates = setup.flags, setup.templates
    served = flags.agent_command or flags.agent_endpoint or flags.server[0] == "verifiers"
    if served and not flags.episode_timeout:
        flags = replace(flags, episode_timeout=PROGRAM_TIMEOUT)  # type: ignore[type-var]
    chat = ChatFormat(
        tokenizer,
        chat=templates.apply_chat_template,
        kwargs=templates.chat_template_kwargs,
        images=images,
    )
    parser = flags.tool_parser or detect(tokenizer.chat_template or "")
    parse = parser_for(parser, None) if parser else parse_no_calls
    return EpisodeConfig(chat, parse, flags, flags.agent_sample_unit == "step")
