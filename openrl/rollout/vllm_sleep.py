"""How a vLLM engine gives its memory to others and takes it back, in two stages: weights, then
cache."""

from __future__ import annotations

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

    def __init__(self, llm: Any, asleep: Asleep, level: int, on_cpu: bool) -> None:
        self._llm, self._asleep, self._level, self._on_cpu = llm, asleep, level, on_cpu

    async def free(self, *parts: EnginePart) -> None:
        """Free ``parts``, which count as asleep already; no request runs."""
        before = self._asleep.parts - {*parts}
        await self._llm.reset_prefix_cache()
        if self._on_cpu:
            if "cache" in parts:
                await self._llm.collective_rpc("openrl_free_cache")
            return
        if before and not hasattr(self._llm, "release_kv_cache_memory"):
            # vLLM before it could sleep part by part falls asleep from fully awake alone
            await self._wake(before)
        await self._llm.sleep(level=self._level)
        self._asleep.dropped = self._level == 2
        if awake := TAGS.keys() - self._asleep.parts:
            await self._wake(awake)

    async def restore(self, *parts: EnginePart) -> None:
        if not self._on_cpu:
            await self._wake(parts)

    async def _wake(self, parts: Iterable[str]) -> None:
        await self._llm.wake_up(tags=[TAGS[part] for part in parts])
