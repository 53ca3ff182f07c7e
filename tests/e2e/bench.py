"""Runs of the main command in this process, over roles that live here as well or in processes that
several runs share: flags, checks, data, trainer and files are each run's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrl.cluster.group import LocalGroup, WorkerGroup
from openrl.config.commands import PPOConfig
from openrl.config.groups.placement import ENGINES
from openrl.flags.parser import read_words, resolve
from openrl.flags.schema import collect_flags
from openrl.trainer.launch import train
from openrl.trainer.planning.prepare import prepare
from openrl.workers.residency import Residency
from openrl.workers.roles import Roles, assign_roles, start_roles, worker_arguments
from tests.e2e.runs import metrics, ppo_flags, run_here


def without_ray(config: PPOConfig, inputs: Any) -> None:
    """Trains with all roles in this process."""
    asyncio.run(train(config, inputs, in_this_process))


@contextlib.asynccontextmanager
async def in_this_process(
    config: PPOConfig, device: Any, optimizer_steps: int, stage: Any
) -> AsyncIterator[Roles]:
    groups = {}
    for role, (worker, *args) in worker_arguments(config, device, optimizer_steps).items():
        groups[role] = LocalGroup.create(role, 1, worker, *args)
        await groups[role].call("start")
    try:
        yield assign_roles(config, groups)
    finally:
        for group in groups.values():
            await group.close()


@dataclass
class Bench:
    """Runs the command in this process, over worker groups that are alive."""

    runner: asyncio.Runner
    task: Path
    groups: dict[str, WorkerGroup]
    residency: Residency

    def __call__(self, out: Path, **changes: object) -> list[dict[str, float]]:
        """The metrics of each step of a run that has ended well."""
        run = lambda *args: self.runner.run(train(*args, self.lend))  # noqa: E731
        assert run_here(ppo_flags(self.task, out, **changes), run) == 0
        return metrics(out)

    @contextlib.asynccontextmanager
    async def lend(
        self, config: PPOConfig, device: Any, optimizer_steps: int, stage: Any
    ) -> AsyncIterator[Roles]:
        """The groups that the run needs, each with the model that its flags describe, built
        anew."""
        made_of = worker_arguments(config, device, optimizer_steps)
        models = {role: spec for role, (_, spec, *_) in made_of.items() if role != ENGINES}
        # one after the other: where roles sleep, there is room for one
        for role, spec in models.items():
            await self.groups[role].call("start", spec)
            await self.residency.started(role, self.groups[role])
        yield assign_roles(config, self.groups, self.residency)


@contextlib.contextmanager
def started(task: Path, out: Path, **changes: object) -> Iterator[Bench]:
    """All processes that a run with these flags would start, by the code that starts them."""
    words = ppo_flags(task, out, **changes)
    config, problems = resolve(PPOConfig, collect_flags(PPOConfig), read_words(words)[0])
    assert not problems, problems
    with asyncio.Runner() as runner:
        starting = start_roles(
            config, prepare(config).device, 1000, lambda name: contextlib.nullcontext()
        )
        roles = runner.run(starting.__aenter__())
        groups = {
            "actor": roles.policy,
            "critic": roles.critic,
            "reference": roles.reference,
            "reward": roles.reward,
        }
        try:
            alive = {ENGINES: roles.engines} | {
                role: group for role, group in groups.items() if group is not None
            }
            yield Bench(runner, task, alive, roles.residency)
        finally:
            runner.run(starting.__aexit__(None, None, None))
