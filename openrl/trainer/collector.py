"""Prompts in, scored groups out: spreads work over the rollout engines and streams it back."""

from __future__ import annotations

from collections.abc import Callable

from openrl.cluster.group import WorkerGroup
from openrl.cluster.rollout_worker import CollectRequest
from openrl.trainer.waiting import all_or_first_error
from openrl.types import Group, Prompt

OnGroup = Callable[[int, int], None]
"""``on_group(done, total)``: told of each group that has arrived."""


class Collector:
    def __init__(self, engines: WorkerGroup) -> None:
        self.engines = engines

    async def collect(self, prompts: list[Prompt], request: CollectRequest, on_group: OnGroup) -> list[Group]:
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

        await all_or_first_error(drain(rank) for rank in range(size))
        return [g for g in groups if g is not None]
