"""Prompts in, scored groups out: spreads work over the rollout engines and streams it back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from openrl.cluster.group import WorkerGroup
from openrl.cluster.rollout_worker import CollectRequest
from openrl.types import Group, Prompt


class Collector:
    def __init__(self, engines: WorkerGroup) -> None:
        self.engines = engines

    async def collect(
        self, prompts: list[Prompt], request: CollectRequest, on_group: Callable[[int, int], None]
    ) -> list[Group]:
        """One group per prompt, in the order of ``prompts`` whatever the order of arrival.

        Prompt i goes to engine ``i % engines``: one call per engine, whose groups stream back as they
        finish. ``on_group(done, total)`` is told of each.
        """
        groups: list[Group | None] = [None] * len(prompts)
        size = self.engines.size
        done = 0

        async def drain(rank: int) -> None:
            nonlocal done
            share = list(enumerate(prompts))[rank::size]
            if not share:
                return
            async for position, group in self.engines.stream(rank, "collect", share, request):
                groups[position] = group
                done += 1
                on_group(done, len(prompts))

        await all_or_first_error([drain(rank) for rank in range(size)])
        return [g for g in groups if g is not None]


async def all_or_first_error(work: list[Coroutine[Any, Any, None]]) -> None:
    """Wait for all; the first failure cancels the rest and is raised as it is."""
    tasks = [asyncio.create_task(w) for w in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
