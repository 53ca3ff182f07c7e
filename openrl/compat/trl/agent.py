"""TRL's environment classes beside the engine: their methods are the tools of an agent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from openrl.agents.base import Agent, ToolError, Toolset
from openrl.agents.files.build import FileAgent
from openrl.agents.files.calls import MethodCall
from openrl.agents.tools.agent import ToolAgent
from openrl.agents.tools.toolbox import Toolbox
from openrl.processes.child import CallFailed
from openrl.processes.pool import Lease
from openrl.types import Prompt, Sampling
from openrl.vision.parts import Content


def play_tools(files: FileAgent, process: Lease, sampling: Sampling) -> Agent:
    tools = ProcessTools(process, files.pool.facts.schemas)
    toolbox = Toolbox([tools], files.config.limits.env_step_timeout)
    return ToolAgent(lambda: toolbox, files.config)


class ProcessTools(Toolset):
    """The tools of one episode, in a process that is lent to it and runs one call at a time."""

    def __init__(self, process: Lease, schemas: Sequence[Mapping[str, Any]]) -> None:
        self.schemas, self._process = schemas, process
        self._turn = asyncio.Lock()

    async def start(self, prompt: Prompt) -> str:
        return await self._process.call(MethodCall("start", (prompt,)))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        """Call a tool. Raises ToolError, and CallFailed once the process has ended."""
        result, failed = await self._ask("use", name, dict(arguments))
        if failed:
            raise ToolError(result)
        return result

    async def reward(self) -> float | None:
        return await self._ask("reward")

    async def _ask(self, method: str, *arguments: Any) -> Any:
        async with self._turn:
            if not self._process.is_alive:
                message = "the agent's process has ended, and with it the state of the episode"
                raise CallFailed(message, "crash")
            return await self._process.call(MethodCall(method, arguments))
