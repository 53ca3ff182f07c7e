"""A rank that a launcher started dies: the others end with a sentence, not with the library's."""

import asyncio
import os

import pytest

from openrl.cluster.group import WorkerDied
from openrl.cluster.launcher_group import LauncherGroup
from openrl.training_engine.distributed import Launch
from tests.experience import on_ranks


class Worker:
    def __init__(self, context):
        self.rank = context.rank

    def work(self, dies):
        if dies and self.rank == 1:
            os._exit(0)
        return self.rank


def driver(rank, port):
    launch = Launch(rank, 2, rank, "127.0.0.1", port)
    launch.join("cpu", 30)
    group = LauncherGroup("model", launch, Worker)

    async def run():
        assert await group.call("work", False) == [0, 1]
        with pytest.raises(WorkerDied, match="model rank 0 of 2 lost the others in work: "):
            await group.call("work", True)
        with pytest.raises(WorkerDied, match="lost the others in any_rank: "):
            await group.any_rank(False)

    asyncio.run(run())


def test_who_is_left_says_so():
    on_ranks(2, driver)
