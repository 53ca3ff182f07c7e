"""Sleep of a vLLM engine, which gives up memory and takes it back in two parts: weights and
cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from openrl.rollout.engine import EnginePart, SleepRecord

TAGS = {"weights": "weights", "cache": "kv_cache"}
"""Our name of each part -> vLLM's."""


class VLLMSleep:
    """Puts vLLM's parts to sleep at ``level`` (1: weights move to host memory, 2: they are
    dropped).

    vLLM falls asleep as a whole and wakes part by part. On a CPU vLLM's sleep does nothing, so we
    return the pages of the cache to the system. The weights stay in host memory, where level 1
    would put them.
    """

    def __init__(self, llm: Any, asleep: SleepRecord, level: int, on_cpu: bool) -> None:
        self._llm, self._asleep, self._level, self._on_cpu = llm, asleep, level, on_cpu

    async def free(self, *parts: EnginePart) -> None:
        """Free ``parts``, which ``asleep`` already lists. No request may run."""
        before = self._asleep.parts - {*parts}
        await self._llm.reset_prefix_cache()
        if self._on_cpu:
            if "cache" in parts:
                await self._llm.collective_rpc("openrl_free_cache")
            return
        if before and not hasattr(self._llm, "release_kv_cache_memory"):
            # older vLLM, which cannot sleep part by part, falls asleep only from fully awake
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
