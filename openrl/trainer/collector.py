"""Prompts in, scored groups out: spreads work over the rollout engines and streams it back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from openrl.cluster.group import WorkerGroup
from openrl.cluster.rollout_worker import CollectRequest, Scores, Unscored, scored
from openrl.types import Group, Prompt

OnGroup = Callable[[int, int], None]
"""``on_group(done, total)``: told of each group that has arrived."""

Replace = Callable[[Group], Prompt | None]
"""``replace(group)``: the prompt to try because of this group; None if the group will do."""


Judge = Callable[[Group], Awaitable[None]]
"""``await judge(group)`` completes the scores of a group that has arrived, before anybody is told
of it."""


def keep_all(group: Group) -> None:
    """No group is replaced."""


Counts = Callable[[Group], bool]
"""``counts(group)``: whether a group that is not replaced is one of those wanted."""


def every(group: Group) -> bool:
    """All count."""
    return True


async def as_it_is(group: Group) -> None:
    """The engine's side has scored the group."""


def whole(item: Group | Unscored | Scores, group: Group | None) -> Group:
    """The group that an item is of; ``group`` is what came before of it."""
    if isinstance(item, Unscored):
        return item.group
    if isinstance(item, Group):
        return item
    assert group is not None  # scores follow their group
    return scored(group, item)


class _Enough(Exception):
    """As many groups will do as were wanted."""


class Collector:
    """``in_order``: groups are judged when all have arrived, in the order of their prompts, instead
    of as they come."""

    def __init__(self, engines: WorkerGroup, in_order: bool = False) -> None:
        self.engines, self.in_order = engines, in_order

    async def collect(
        self,
        prompts: list[Prompt],
        request: CollectRequest,
        on_group: OnGroup,
        replace: Replace = keep_all,
        judge: Judge = as_it_is,
        wanted: int | None = None,
        counts: Counts = every,
        generated: asyncio.Future[list[Group]] | None = None,
    ) -> list[Group]:
        """One group per prompt, in the order of ``prompts`` whatever the order of arrival, then one
        per replacement.

        Prompt i goes to engine ``i % engines``: one call per engine, whose groups stream back as
        they finish. A replacement goes at once to the engine that has just become free, so all stay
        busy; the others generate on while a group is judged. ``on_group(done, total)`` is told of
        each group that is not replaced. When ``wanted`` of them count, those still under way are
        given up; None: never. ``generated`` is given the groups once all have come, while scores
        may still be out; a group that is replaced cannot be known by then."""
        if self.in_order:
            return await self._collect_in_order(
                prompts, request, on_group, replace, judge, generated
            )
        groups: dict[int, Group] = {}
        judged: list[int] = []
        started, done, good, total = len(prompts), 0, 0, wanted or len(prompts)

        async def drain(rank: int, share: list[tuple[int, Prompt]]) -> None:
            async for items in self.engines.stream(rank, "collect", share, request):
                for position, item in items:
                    came(position, whole(item, groups.get(position)))
                    if not isinstance(item, Unscored):
                        running.create_task(arrived(rank, position, groups[position]))

        def came(position: int, group: Group) -> None:
            groups[position] = group
            if generated is not None and not generated.done() and len(groups) == started:
                generated.set_result([groups[position] for position in sorted(groups)])

        async def arrived(rank: int, position: int, group: Group) -> None:
            nonlocal started, done, good
            await judge(group)
            if good == wanted:
                return
            judged.append(position)
            if (prompt := replace(group)) is None:
                done, good = done + 1, good + counts(group)
                on_group(min(done, total), total)
                if good == wanted:
                    raise _Enough
            else:
                running.create_task(drain(rank, [(started, prompt)]))
                started += 1

        try:
            async with asyncio.TaskGroup() as running:
                for rank, share in self._shares(prompts):
                    running.create_task(drain(rank, share))
        except ExceptionGroup as failed:
            if errors := [error for error in failed.exceptions if not isinstance(error, _Enough)]:
                raise errors[0] from None
        return [groups[position] for position in sorted(judged)]

    def _shares(
        self, prompts: list[Prompt], first: int = 0
    ) -> list[tuple[int, list[tuple[int, Prompt]]]]:
        """(engine, its numbered prompts), the numbers from ``first`` on."""
        numbered, size = list(enumerate(prompts, first)), self.engines.size
        return [(rank, numbered[rank::size]) for rank in range(min(size, len(prompts)))]

    async def _collect_in_order(
        self,
        prompts: list[Prompt],
        request: CollectRequest,
        on_group: OnGroup,
        replace: Replace,
        judge: Judge,
        generated: asyncio.Future[list[Group]] | None,
    ) -> list[Group]:
        """Round by round: each waits for all its groups; what they are replaced by is the next."""
        groups: dict[int, Group] = {}
        wanted, done = len(prompts), 0
        while prompts:
            arrived: dict[int, Group] = {}

            async def drain(
                rank: int, share: list[tuple[int, Prompt]], arrived: dict[int, Group] = arrived
            ) -> None:
                async for items in self.engines.stream(rank, "collect", share, request):
                    arrived.update(
                        {position: whole(item, arrived.get(position)) for position, item in items}
                    )
                    if generated is not None and not generated.done() and len(arrived) == wanted:
                        generated.set_result([arrived[position] for position in sorted(arrived)])

            try:
                async with asyncio.TaskGroup() as running:
                    for rank, share in self._shares(prompts, len(groups)):
                        running.create_task(drain(rank, share))
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
            prompts = []
            for position in sorted(arrived):
                await judge(arrived[position])
                groups[position] = arrived[position]
                if (prompt := replace(arrived[position])) is None:
                    done += 1
                    on_group(done, wanted)
                else:
                    prompts.append(prompt)
        return [groups[position] for position in sorted(groups)]
