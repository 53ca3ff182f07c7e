"""A rank that a launcher started dies: the others end with a sentence, not with the library's."""

import asyncio
import os

import pytest

from openrl.cluster.group import WorkerDied
from openrl.cluster.launcher_group import LauncherGroup
from openrl.training_engine.distributed import Launch
from tests.experience import on_ranks

pytestmark = pytest.mark.full


class Worker:
    def __init__(self, context):
        self.rank = context.rank

    def work(self, dying):
        if self.rank == dying:
            os._exit(0)
        return self.rank


async def drive(group, dying):
    await group.build(Worker)
    assert await group.call("work", None) == [0, 1]
    with pytest.raises(WorkerDied, match="model rank 0 of 2 lost the others in work: "):
        await group.call("work", dying)
    with pytest.raises(WorkerDied, match="lost the others in "):
        await group.call("work", None)
    await group.close()


def rank_of_two(rank, port, dying):
    launch = Launch(rank, 2, rank, "127.0.0.1", port)
    launch.join("cpu", 30)
    group = LauncherGroup("model", launch)
    if rank == 0:
        asyncio.run(drive(group, dying))
        return
    with pytest.raises(WorkerDied, match="model rank 1 of 2 lost the others in "):
        group.serve()


@pytest.mark.parametrize("dying", [0, 1])
def test_who_is_left_says_so(dying):
    on_ranks(2, rank_of_two, dying)
