"""Prompts in, scored groups out: spreads work over the rollout engines and streams it back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from openrl.cluster.group import WorkerGroup
from openrl.cluster.rollout_worker import CollectRequest, Unscored, scored
from openrl.types import Group, Prompt

OnGroup = Callable[[int, int], None]
"""``on_group(done, total)``: told of each group that has arrived."""

Replace = Callable[[Group], Prompt | None]
"""``replace(group)``: the prompt to try because of this group; None if the group will do."""


Judge = Callable[[Group], Awaitable[None]]
"""``await judge(group)`` completes the scores of a group that has arrived, before anybody is told of it."""


def keep_all(group: Group) -> None:
    """No group is replaced."""


async def as_it_is(group: Group) -> None:
    """The engine's side has scored the group."""


class Collector:
    def __init__(self, engines: WorkerGroup) -> None:
        self.engines = engines

    async def collect(
        self,
        prompts: list[Prompt],
        request: CollectRequest,
        on_group: OnGroup,
        replace: Replace = keep_all,
        judge: Judge = as_it_is,
        generated: asyncio.Future[list[Group]] | None = None,
    ) -> list[Group]:
        """One group per prompt, in the order of ``prompts`` whatever the order of arrival, then one per replacement.

        Prompt i goes to engine ``i % engines``: one call per engine, whose groups stream back as they finish. A
        replacement goes at once to the engine that has just become free, so all stay busy; the others generate on while
        a group is judged. ``on_group(done, total)`` is told of each group that is not replaced. ``generated`` is given
        the groups once all have come, while scores may still be out; a group that is replaced cannot be known by then.
        """
        groups: dict[int, Group] = {}
        started, done, size = len(prompts), 0, self.engines.size

        async def drain(rank: int, share: list[tuple[int, Prompt]]) -> None:
            async for position, item in self.engines.stream(rank, "collect", share, request):
                if isinstance(item, Unscored):
                    came(position, item.group)
                    continue
                group = item if isinstance(item, Group) else scored(groups[position], item)
                came(position, group)
                running.create_task(arrived(rank, position, group))

        def came(position: int, group: Group) -> None:
            groups[position] = group
            if generated is not None and not generated.done() and len(groups) == started:
                generated.set_result([groups[position] for position in sorted(groups)])

        async def arrived(rank: int, position: int, group: Group) -> None:
            nonlocal started, done
            await judge(group)
            if (prompt := replace(group)) is None:
                done += 1
                on_group(done, len(prompts))
            else:
                running.create_task(drain(rank, [(started, prompt)]))
                started += 1

        try:
            async with asyncio.TaskGroup() as running:
                for rank in range(min(size, len(prompts))):
                    running.create_task(drain(rank, list(enumerate(prompts))[rank::size]))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [groups[position] for position in sorted(groups)]
