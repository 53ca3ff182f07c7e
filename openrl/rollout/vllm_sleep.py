"""How a vLLM engine gives its memory to others and takes it back, in two stages: weights, then
cache."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from openrl.rollout.asleep import Asleep, EnginePart

TAGS = {"weights": "weights", "cache": "kv_cache"}
"""Our names of the parts -> vLLM's."""


class VLLMSleep:
    """Puts vLLM's parts to sleep at ``level`` (1: weights wait in host memory, 2: they are
    dropped).

    vLLM sleeps as a whole and wakes part by part. On a CPU its sleep does nothing; there the pages
    of the cache are given back, and the weights stay where level 1 would put them, in host memory.
    """

    def __init__(self, llm: Any, level: int, on_cpu: bool) -> None:
        self._llm, self._level, self._on_cpu = llm, level, on_cpu
        self._asleep = Asleep()
        self._dropped = False  # level 2: what came back is memory without content
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def require(self, what: str, *parts: EnginePart) -> None:
        """Raises RuntimeError if one of ``parts`` is asleep."""
        self._asleep.require(what, *parts)

    def begin(self) -> None:
        """A request starts. Raises RuntimeError if the engine cannot answer it."""
        self.require("a request", "weights", "cache")
        if self._dropped:
            raise RuntimeError(
                "this engine dropped its weights when it slept, and none were sent since"
            )
        self._running += 1
        self._idle.clear()

    def end(self) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()

    def synced(self) -> None:
        """All weights were sent."""
        self._dropped = False

    async def sleep(self, *parts: EnginePart) -> None:
        """Wait until no request runs, then free ``parts``; further requests are refused at once."""
        before = {*self._asleep.parts}
        self._asleep.add(*parts)
        await self._idle.wait()
        await self._llm.reset_prefix_cache()
        if self._on_cpu:
            if "cache" in parts:
                await self._llm.collective_rpc("openrl_free_cache")
            return
        if before and not hasattr(self._llm, "release_kv_cache_memory"):
            await self._wake(
                before
            )  # vLLM before it could sleep part by part falls asleep from fully awake alone
        await self._llm.sleep(level=self._level)
        self._dropped = self._level == 2
        if awake := TAGS.keys() - self._asleep.parts:
            await self._wake(awake)

    async def wake(self, *parts: EnginePart) -> None:
        if not self._on_cpu:
            await self._wake(parts)
        self._asleep.remove(*parts)

    async def _wake(self, parts: Iterable[str]) -> None:
        await self._llm.wake_up(tags=[TAGS[part] for part in parts])
