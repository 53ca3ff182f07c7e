"""train_ppo_ray, which also says when each part of its start is over, for ``benchmarks.start``.

Imports nothing heavy before the command itself does."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from openrl.cli.run import command
from openrl.cli.train_ppo_ray import prepare, run
from openrl.config.commands import PPOConfig
from openrl.processes.leave import leave

MARK = "mark:"
REWARD = "first reward"  # the last mark


def say(mark: str) -> None:
    """Print a mark with the seconds of the clock that all processes of a machine share."""
    print(f"{MARK}{mark}:{time.monotonic()}", flush=True)


def marked_run(config: PPOConfig, inputs: Any) -> None:
    say("checks")
    from openrl.cluster import ray_group
    from openrl.cluster.ray_group import RayGroup

    open_cluster, play = ray_group.open_cluster, RayGroup.call_one

    def opened(*args: Any) -> Any:
        cluster = open_cluster(*args)
        say("Ray")
        return cluster

    async def played(group: RayGroup, *args: Any) -> Any:
        answer = await play(group, *args)
        if args[1] == "play":
            RayGroup.call_one = play  # type: ignore[method-assign]
            say(REWARD)
        return answer

    ray_group.open_cluster = opened
    RayGroup._gather = after(RayGroup._gather)  # type: ignore[method-assign]
    RayGroup.call_one = played  # type: ignore[method-assign]
    run(config, inputs)


def after(ask: Callable[..., Awaitable[Any]]) -> Any:
    """Say when all ranks of a group have a process, have built their worker, and have started."""
    ends = {"__init__": "imports", "start": "process"}

    async def asked(group: Any, method: str, pending: Any) -> Any:
        answers = await ask(group, method, pending)
        if method in ends:
            built = method == "start" and group._watcher
            say(f"{group.role} {'ready' if built else ends[method]}")
        return answers

    return asked


if __name__ == "__main__":
    leave(command(PPOConfig, prepare, marked_run))
