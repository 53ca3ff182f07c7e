"""TRL's environments, whose methods are tools, in the process of the file."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from openrl.agents.base import ToolError
from openrl.agents.foreign.calls import Call
from openrl.agents.tools.trl import TrlTools, trl_tools
from openrl.processes.worker import AskParent
from openrl.vision.parts import Content


class ToolPlayer:
    """Runs the tools of a class. ``calls.Call`` names its methods."""

    def __init__(self, made: type) -> None:
        self._open = trl_tools(made)
        self.schemas = self._open().schemas
        self._runner = asyncio.Runner()
        self._tools: TrlTools | None = None  # those of the episode

    def call(self, asked: Call, ask: AskParent) -> Any:
        return self._runner.run(getattr(self, asked.method)(*asked.arguments))

    async def start(self, prompt: Any) -> str:
        self._tools = self._open()
        return await self._tools.start(prompt)

    async def use(self, name: str, arguments: Mapping[str, Any]) -> tuple[Content, bool]:
        """Call a tool. Return what it says, and whether it failed."""
        assert self._tools is not None
        try:
            return await self._tools.call(name, arguments), False
        except ToolError as error:
            return str(error), True

    async def reward(self) -> float | None:
        assert self._tools is not None
        return await self._tools.reward()
