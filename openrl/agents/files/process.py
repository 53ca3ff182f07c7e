"""Environments and programs of files. Each episode has a process to itself, so that code
which blocks, hangs, crashes or eats memory costs only its episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrl.agents.base import Environment, EpisodeResult, Generate, Step
from openrl.agents.endpoint.server import AgentEndpoint
from openrl.agents.endpoint.session import Session
from openrl.agents.files.calls import MethodCall
from openrl.processes.child import CallFailed
from openrl.processes.pool import Lease
from openrl.types import Image, Message, Prompt, Sampling, Trajectory


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
        answer, self.reductions = await self._process.call(MethodCall(method, arguments))
        return answer

    async def frame(self) -> Image | None:
        return await self._process.call(MethodCall("frame"))

    async def close(self) -> None:
        if self._begun and self._process.is_alive:
            self._begun = False
            await self._process.call(MethodCall("close"))


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
