"""How the groups of one training step are come by: all at once, in rounds, or more of them than are
needed."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace
from typing import Protocol

from openrl.cluster.rollout_worker import CollectRequest
from openrl.data.prompts import PromptStream
from openrl.tracking.metrics import Metric, Sum
from openrl.trainer.collector import Counts, OnGroup, Replace, every, keep_all
from openrl.trainer.filtering import DynamicFilter
from openrl.types import Group, Prompt


class Collect(Protocol):
    def __call__(
        self,
        prompts: list[Prompt],
        request: CollectRequest,
        on_group: OnGroup,
        replace: Replace = keep_all,
        wanted: int | None = None,
        counts: Counts = every,
    ) -> Awaitable[list[Group]]:
        """See ``Collector.collect``."""


async def fill(
    collect: Collect,
    stream: PromptStream,
    request: CollectRequest,
    on_group: OnGroup,
    wanted: int,
    running: int,
    chosen: DynamicFilter | None = None,
) -> tuple[list[Group], dict[str, Metric]]:
    """The groups that were generated until ``wanted`` of them will do, and what was given up for
    it.

    ``running`` are the prompts that run or are accepted at a time (--vllm_generate_batch_size).
    More than wanted: the slowest groups are given up when there are enough, and counted. Fewer:
    rounds of that many prompts, which ``chosen`` picks from."""
    if running < wanted and chosen is not None:
        return await _rounds(collect, stream, request, on_group, wanted, running, chosen), {}
    before, prompts = chosen.left if chosen else 0, stream.take(running)
    exchange, counts = (chosen.replace, chosen.accepts) if chosen else (keep_all, every)
    groups = await collect(
        prompts, request, on_group, exchange, wanted if running > wanted else None, counts
    )
    if running == wanted:
        return groups, {}
    tried = running + (before - chosen.left if chosen else 0)
    return groups, {"rollout/surplus_groups": Sum(tried - len(groups))}


async def _rounds(
    collect: Collect,
    stream: PromptStream,
    request: CollectRequest,
    on_group: OnGroup,
    wanted: int,
    running: int,
    chosen: DynamicFilter,
) -> list[Group]:
    groups: list[Group] = []
    accepted, may_try = 0, wanted + chosen.left
    while accepted < wanted and len(groups) < may_try:
        prompts = stream.take(min(running, wanted - accepted, may_try - len(groups)))
        found = await collect(prompts, replace(request, first=len(groups)), _silent)
        groups += found
        accepted += sum(chosen.judge(group) for group in found)
        on_group(accepted, wanted)
    return groups


def _silent(done: int, total: int) -> None:
    """A round's own progress is not the step's."""
