"""Opens the agent that the flags choose, and checks it before anything starts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedTokenizerBase

from openrl.agents.base import Agent
from openrl.agents.checks import (
    Check,
    check_command,
    check_file,
    check_nothing,
    check_server,
    check_tags,
    check_tools,
)
from openrl.agents.command_agent import AgentCommand
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.endpoint.server import AgentEndpoint, serve
from openrl.agents.environments.tags import open_tag_agent
from openrl.agents.files.build import agent_file, open_file_agent
from openrl.agents.interfaces import AgentServer
from openrl.agents.setup import AgentSetup, episode_config
from openrl.agents.single_turn import SingleTurn
from openrl.agents.tools.agent import ToolAgent
from openrl.agents.tools.build import open_toolbox
from openrl.data.images import RowImages
from openrl.extension_points import agent_servers
from openrl.registry import resolve

Serve = Callable[[], AbstractAsyncContextManager[AgentEndpoint]]
"""Opens the endpoint of the engine."""
Open = Callable[[AgentSetup, EpisodeConfig, Serve], AbstractAsyncContextManager[Agent]]


@dataclass(frozen=True)
class AgentKind:
    """A way to choose an agent by flag."""

    chosen: Callable[[AgentSetup], object]  # whether the flags choose it
    open: Open
    check: Check


@asynccontextmanager
async def open_agent(
    setup: AgentSetup,
    tokenizer: PreTrainedTokenizerBase,
    rank: int = 0,
    images: RowImages | None = None,
) -> AsyncIterator[Agent]:
    """Open the agent of the engine ``rank``. Its processes and servers end with the context.
    Without ``images``, conversations hold only text."""
    config = episode_config(setup, tokenizer, images)
    first = setup.flags.agent_endpoint_port
    port = first and first + rank  # 0: any free one
    async with kind_of(setup).open(setup, config, partial(serve, config, port)) as agent:
        yield agent


def check_agents(
    setup: AgentSetup, tokenizer: PreTrainedTokenizerBase, source: str | None, longest: int
) -> None:
    """Check the agent that the flags choose. ``source`` is the flag of a reward source, if there is
    one, and ``longest`` the most tokens of a row.

    This loads an agent's file in a separate process, and the tools. Raises UserError for anything
    that cannot be played."""
    chat = episode_config(setup, tokenizer).chat
    kind_of(setup).check(setup, chat, source, longest)


@asynccontextmanager
async def _open_command(
    setup: AgentSetup, config: EpisodeConfig, serve: Serve
) -> AsyncIterator[Agent]:
    async with serve() as endpoint:
        yield AgentCommand(str(setup.flags.agent_command), endpoint)


@asynccontextmanager
async def _open_server(
    setup: AgentSetup, config: EpisodeConfig, serve: Serve
) -> AsyncIterator[Agent]:
    name, address = setup.flags.server
    server: AgentServer = agent_servers[name].component
    if server.plays_alone:
        async with serve() as endpoint, resolve(server.open)(address, config, endpoint) as agent:
            yield agent
    else:
        async with resolve(server.open)(address, config, None) as agent:
            yield agent


@asynccontextmanager
async def _open_file(
    setup: AgentSetup, config: EpisodeConfig, serve: Serve
) -> AsyncIterator[Agent]:
    flags, settings = setup.flags, setup.environments.env_config
    file = agent_file(str(flags.agent_func_path), setup.plugins, settings)
    if flags.agent_endpoint:
        async with serve() as endpoint, open_file_agent(file, config, endpoint) as agent:
            yield agent
    else:
        async with open_file_agent(file, config) as agent:
            yield agent


def _open_tags(
    setup: AgentSetup, config: EpisodeConfig, serve: Serve
) -> AbstractAsyncContextManager[Agent]:
    return open_tag_agent(setup.environments, setup.plugins, config)


@asynccontextmanager
async def _open_tools(
    setup: AgentSetup, config: EpisodeConfig, serve: Serve
) -> AsyncIterator[Agent]:
    toolbox = await open_toolbox(str(setup.flags.tools), setup.flags.env_step_timeout)
    yield ToolAgent(toolbox, config)


@asynccontextmanager
async def _open_single_turn(
    setup: AgentSetup, config: EpisodeConfig, serve: Serve
) -> AsyncIterator[Agent]:
    yield SingleTurn(config.chat.tokenizer.decode)


KINDS = (
    AgentKind(lambda setup: setup.flags.agent_command, _open_command, check_command),
    AgentKind(lambda setup: setup.flags.server[0], _open_server, check_server),
    AgentKind(lambda setup: setup.flags.agent_func_path, _open_file, check_file),
    AgentKind(lambda setup: setup.environments.env_tags, _open_tags, check_tags),
    AgentKind(lambda setup: setup.flags.tools, _open_tools, check_tools),
    AgentKind(lambda setup: True, _open_single_turn, check_nothing),
)
"""The first that the flags ask for plays. A rule refuses several."""


def kind_of(setup: AgentSetup) -> AgentKind:
    return next(kind for kind in KINDS if kind.chosen(setup))
