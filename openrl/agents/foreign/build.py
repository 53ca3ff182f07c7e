"""Opens the agent that plays what a user's file brings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from openrl.agents.base import Agent
from openrl.agents.conversation import Play
from openrl.agents.endpoint.server import Endpoint
from openrl.agents.environment_agent import EnvironmentAgent
from openrl.agents.foreign.calls import Facts
from openrl.agents.foreign.environment import FileAgent, ProcessEnvironment, RawText
from openrl.agents.foreign.executor_agent import ExecutorAgent
from openrl.agents.foreign.own_agent import OwnAgent
from openrl.agents.foreign.player import AgentFile
from openrl.agents.foreign.process_tools import ProcessTools
from openrl.agents.foreign.program_agent import ProgramAgent
from openrl.agents.foreign.recognise import find_class
from openrl.agents.tool_agent import ToolAgent
from openrl.agents.tools.toolbox import Toolbox
from openrl.config.groups.agent import TurnFlags, split_agent_path
from openrl.processes.child import ChildProcess, Limits
from openrl.processes.pool import Lease, ProcessPool
from openrl.processes.worker import load_module
from openrl.types import Sampling


def agent_file(given: str) -> AgentFile:
    """Read the value of --agent_func_path, PATH.py[:CLASS]."""
    path, name = split_agent_path(given)
    return AgentFile(Path(path).expanduser().absolute(), name)


def recognise(file: AgentFile) -> Facts:
    """Load the file in a separate process and return what it brings. Raises UserError if it does
    not load, or has no class that can be played."""
    with ChildProcess(file, process_limits(TurnFlags()), "agent") as process:
        process.start()
        return process.facts


def process_limits(flags: TurnFlags) -> Limits:
    return Limits(flags.env_step_timeout, flags.memory, "--env_step_timeout", "--env_memory_gb")


def environment_agent_of(play: Play) -> Callable[[Lease, Sampling], Agent]:
    def made(process: Lease, sampling: Sampling) -> Agent:
        environment = ProcessEnvironment(process, sampling)
        return EnvironmentAgent(lambda _: environment, play)

    return made


def tool_agent_of(play: Play, facts: Facts) -> Callable[[Lease, Sampling], Agent]:
    def made(process: Lease, sampling: Sampling) -> Agent:
        tools = ProcessTools(process, facts.schemas)
        return ToolAgent(lambda: Toolbox([tools], play.limits.env_step_timeout), play)

    return made


@asynccontextmanager
async def open_file_agent(
    file: AgentFile, play: Play, endpoint: Endpoint | None = None
) -> AsyncIterator[Agent]:
    """Open the agent of one engine. ``endpoint`` serves a class that plays against one. Raises
    UserError like ``recognise``."""
    size = play.limits.at_once
    threads = ThreadPoolExecutor(size, thread_name_prefix="agent")
    pool = ProcessPool(file, size, process_limits(play.limits), "agent", threads)
    try:
        async with pool.lease() as process:
            await process.start()
        facts: Facts = pool.facts
        if facts.kind == "program":
            assert endpoint is not None, "a check refuses such a class without --agent_endpoint"
            yield ProgramAgent(pool, endpoint)
        elif facts.kind == "executor":
            yield ExecutorAgent(pool, play)
        elif facts.kind == "agent":
            await pool.close()  # the agent plays in this process, and must not block it
            made = find_class(load_module(file.path, "agent_file"), file.class_name).made
            yield OwnAgent(made(play), play.limits.episode_timeout)
        elif facts.kind == "trl":
            yield FileAgent(pool, tool_agent_of(play, facts))
        else:
            if facts.kind == "turns":
                raw = RawText(play.chat)
                play = replace(play, chat=raw)
            yield FileAgent(pool, environment_agent_of(play))
    finally:
        await pool.close()
        await asyncio.to_thread(threads.shutdown)
