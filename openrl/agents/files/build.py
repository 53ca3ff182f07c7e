"""Opens the agent that plays what a user's file brings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from openrl.agents.base import Agent, Generate
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.endpoint.server import AgentEndpoint
from openrl.agents.environments.agent import EnvironmentAgent
from openrl.agents.files.adapter import AgentFile
from openrl.agents.files.calls import AgentInfo
from openrl.agents.files.detect import find_class
from openrl.agents.files.process import ProcessEnvironment, ProgramAgent
from openrl.agents.time_limits import time_limit
from openrl.config.groups.agent import TurnFlags, read_class_config
from openrl.files import file_and_name
from openrl.processes.child import ChildProcess, Limits
from openrl.processes.pool import Lease, ProcessPool
from openrl.processes.worker import Target, load_module
from openrl.registry import resolve
from openrl.types import Prompt, Sampling, Trajectory


def agent_file(
    given: str, plugins: tuple[str, ...] = (), env_config: str | None = None
) -> AgentFile:
    """Read the values of --agent_func_path, PATH.py[:CLASS], and --env_config. Raises UserError
    for a file of settings that cannot be read."""
    path, name = file_and_name(given)
    settings = read_class_config(env_config) if env_config else {}
    return AgentFile(Path(path).expanduser().absolute(), name, plugins, settings)


def agent_info(file: AgentFile) -> AgentInfo:
    """Load the file in a separate process and return what it brings. Raises UserError if nothing in
    it can be played."""
    with ChildProcess(file, process_limits(TurnFlags()), "agent") as process:
        process.start()
        return process.facts


def process_limits(flags: TurnFlags) -> Limits:
    return Limits(flags.env_step_timeout, flags.memory, "--env_step_timeout", "--env_memory_gb")


@asynccontextmanager
async def open_file_agent(
    file: AgentFile, config: EpisodeConfig, endpoint: AgentEndpoint | None = None
) -> AsyncIterator[Agent]:
    """Open the agent of one engine. ``endpoint`` serves a class that plays against one. Raises
    UserError like ``agent_info``."""
    file = replace(file, max_turns=config.limits.max_turns)
    async with open_pool(file, config.limits, "agent") as pool:
        info: AgentInfo = pool.facts
        if not info.interface.agent:
            await pool.close()  # the agent plays in this process, and must not block it
            made, _ = find_class(load_module(file.path, "agent_file"), file.class_name)
            yield OwnAgent(made(config), config.limits.episode_timeout)
        else:
            yield FileAgent(pool, config, endpoint)


@asynccontextmanager
async def open_pool(target: Target, limits: TurnFlags, kind: str) -> AsyncIterator[ProcessPool]:
    """Open the processes of one engine that play ``target``, and start one of them. ``kind`` names
    them in messages. Raises UserError if the target does not load."""
    size = limits.max_concurrency
    threads = ThreadPoolExecutor(size, thread_name_prefix=kind)
    pool = ProcessPool(target, size, process_limits(limits), kind, threads)
    try:
        async with pool.lease() as process:
            await process.start()
        yield pool
    finally:
        await pool.close()
        await asyncio.to_thread(threads.shutdown)


class FileAgent:
    """Plays what a file brings. An episode's time begins once it has been lent a process."""

    def __init__(
        self, pool: ProcessPool, config: EpisodeConfig, endpoint: AgentEndpoint | None
    ) -> None:
        self.pool, self.config, self.endpoint = pool, config, endpoint

    async def run(
        self, prompt: Prompt, generate: Generate, sampling: Sampling
    ) -> Trajectory | list[Trajectory]:
        """Play an episode. Raises UserError for a file that does not load."""
        async with self.pool.lease() as process:
            await process.start()
            make: AgentOfFile = resolve(self.pool.facts.interface.agent)
            return await make(self, process, sampling).run(prompt, generate, sampling)


AgentOfFile = Callable[[FileAgent, Lease, Sampling], Agent]
"""Returns the agent of one episode, for which the process is lent."""


def play_environment(files: FileAgent, process: Lease, sampling: Sampling) -> Agent:
    environment = ProcessEnvironment(process, sampling)
    return EnvironmentAgent(lambda _: environment, files.config)


def play_program(files: FileAgent, process: Lease, sampling: Sampling) -> Agent:
    assert files.endpoint is not None, "a check demands --agent_endpoint of such a class"
    return ProgramAgent(process, files.endpoint)


class OwnAgent:
    """An agent with openrl's own interface, which plays next to the engine. Gives up an episode
    after ``timeout`` seconds; 0 means never. The episode has then failed, because only the agent
    knows what it has played so far."""

    def __init__(self, agent: Agent, timeout: float) -> None:
        self.agent, self.timeout = agent, timeout

    async def run(
        self, prompt: Prompt, generate: Generate, sampling: Sampling
    ) -> Trajectory | list[Trajectory]:
        """Play an episode. Raises RuntimeError if it takes too long, and what the agent raises."""
        late = RuntimeError(f"the agent did not end within {self.timeout:g} s (--episode_timeout)")
        async with time_limit(self.timeout, late):
            return await self.agent.run(prompt, generate, sampling)
