"""Environments, tools and programs of files. Each episode has a process to itself, so that code
which blocks, hangs, crashes or eats memory costs only its episode."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from openrl.agents.base import Environment, EpisodeResult, Generate, Step, ToolError, Toolset
from openrl.agents.chat import ChatFormat
from openrl.agents.endpoint.server import AgentEndpoint
from openrl.agents.endpoint.session import Session
from openrl.agents.files.calls import MethodCall
from openrl.processes.child import CallFailed
from openrl.processes.pool import Lease
from openrl.types import Message, Prompt, Sampling, Trajectory
from openrl.vision.parts import Content


class ProcessEnvironment(Environment):
    """The environment of one episode, in a process that is lent to it."""

    def __init__(self, process: Lease, sampling: Sampling) -> None:
        self._process, self._sampling = process, sampling
        self._begun = False

    async def reset(self, seed: int, prompt: Prompt) -> str | Sequence[Message]:
        self._begun = True
        return await self._call_process("reset", seed, prompt, self._sampling)

    async def step(self, action: str) -> Step:
        return await self._call_process("step", action)

    async def _call_process(self, method: str, *arguments: Any) -> Any:
        told, self.reductions = await self._process.call(MethodCall(method, arguments))
        return told

    async def frame(self) -> Any | None:
        return await self._process.call(MethodCall("frame"))

    async def close(self) -> None:
        if self._begun and self._process.is_alive:
            self._begun = False
            await self._process.call(MethodCall("close"))


class RawText(ChatFormat):
    """A chat as the concatenation of its texts, which OpenRLHF's agents write and read. The text of
    an assistant ends with the special token that it sampled."""

    def __init__(self, chat: ChatFormat) -> None:
        """Tokenises and sees as ``chat``, whose template wrote the prompts if it has one."""
        super().__init__(chat.tokenizer, chat=False, kwargs={}, images=chat.images)
        if chat.chat:  # it wrote the special tokens, too
            self._leading = []

    def reply_text(self, before: list[int], ids: list[int]) -> str:
        return self.decode_after(before, ids)


class ProcessTools(Toolset):
    """The tools of one episode, in a process that is lent to it and runs one call at a time."""

    def __init__(self, process: Lease, schemas: Sequence[Mapping[str, Any]]) -> None:
        self.schemas, self._process = schemas, process
        self._turn = asyncio.Lock()

    async def start(self, prompt: Prompt) -> str:
        return await self._process.call(MethodCall("start", (prompt,)))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        """Call a tool. Raises ToolError, and CallFailed once the process has ended."""
        said, failed = await self._ask("use", name, dict(arguments))
        if failed:
            raise ToolError(said)
        return said

    async def reward(self) -> float | None:
        return await self._ask("reward")

    async def _ask(self, method: str, *arguments: Any) -> Any:
        async with self._turn:
            if not self._process.is_alive:
                said = "the agent's process has ended, and with it the state of the episode"
                raise CallFailed(said, "crash")
            return await self._process.call(MethodCall(method, arguments))


class ProgramAgent:
    """Lets the ``run`` of a file play against the endpoint, in a process of its own."""

    def __init__(self, process: Lease, endpoint: AgentEndpoint) -> None:
        self.process, self.endpoint = process, endpoint

    async def run(self, prompt: Prompt, generate: Generate, sampling: Sampling) -> Trajectory:
        """Play the episode. Raises the same as ``AgentEndpoint.run``."""

        async def play(session: Session) -> EpisodeResult:
            call = MethodCall("play", (prompt, sampling, session.root, session.key))
            try:
                return await self.process.call(call, timeout=0.0)
            except CallFailed as error:
                return EpisodeResult(failure=str(error))

        return await self.endpoint.run(prompt, generate, sampling, play)
