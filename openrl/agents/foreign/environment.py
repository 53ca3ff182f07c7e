"""Environments from files. Each episode runs in a process of its own, so that code which blocks,
hangs, crashes or eats memory costs only its episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from openrl.agents.base import Agent, Generate, Step
from openrl.agents.chat import ChatFormat
from openrl.agents.foreign.calls import Call
from openrl.processes.pool import Lease, ProcessPool
from openrl.types import Message, Prompt, Sampling, Trajectory


class ProcessEnvironment:
    """The environment of one episode, in a process that is lent to it."""

    def __init__(self, process: Lease, sampling: Sampling) -> None:
        self._process, self._sampling = process, sampling
        self._begun = False
        self.reductions: Mapping[str, str] = {}

    async def reset(self, seed: int, prompt: Prompt) -> str | Sequence[Message]:
        self._begun = True
        return await self._call_process("reset", seed, prompt, self._sampling)

    async def step(self, action: str) -> Step:
        return await self._call_process("step", action)

    async def _call_process(self, method: str, *arguments: Any) -> Any:
        told, self.reductions = await self._process.call(Call(method, arguments))
        return told

    async def frame(self) -> Any | None:
        return await self._process.call(Call("frame"))

    async def close(self) -> None:
        if self._begun and self._process.is_alive:
            self._begun = False
            await self._process.call(Call("close"))


class FileAgent:
    """Plays what a file brings, in a process that is lent to each episode. The episode's time
    begins once it has one. ``of_process`` makes the agent of an episode."""

    def __init__(self, pool: ProcessPool, of_process: Callable[[Lease, Sampling], Agent]) -> None:
        self.pool, self.of_process = pool, of_process

    async def run(
        self, prompt: Prompt, generate: Generate, sampling: Sampling
    ) -> Trajectory | list[Trajectory]:
        """Play an episode. Raises UserError if the file does not load, and what the agent
        raises."""
        async with self.pool.lease() as process:
            await process.start()
            return await self.of_process(process, sampling).run(prompt, generate, sampling)


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
