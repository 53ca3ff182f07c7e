"""Rank 0 of a launcher drives the others: answers, errors and signals of all ranks reach it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from openrl.cluster.launcher_group import LauncherGroup
from openrl.errors import UserError
from openrl.training_engine.distributed import Launch
from tests.experience import on_ranks

LIMIT = 30  # seconds that a rank waits for the other


class Refused(Exception):
    """Like many errors of HTTP libraries, it cannot be rebuilt from its arguments."""

    def __init__(self, message, *, reply):
        super().__init__(message)


class Locked(Exception):
    """It cannot even be sent."""

    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()


ERRORS = {
    "user": UserError("no such model", "another name"),
    "refused": Refused("404", reply="no such model"),
    "locked": Locked("no such model"),
}


class Worker:
    def __init__(self, context, word):
        if word != "open":
            raise UserError(f"rank {context.rank}: {word}")
        self.rank = context.rank

    def fail(self, rank, kind):
        if self.rank == rank:
            raise ERRORS[kind]
        return self.rank

    def get(self, number):
        return self.rank, number

    def signal(self, rank):
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)


async def drive(group, caught):
    with pytest.raises(UserError, match="rank 0: shut"):
        await group.build(Worker, "shut")
    await group.build(Worker, "open")
    for failing in range(3):
        for kind, error in ERRORS.items():
            with pytest.raises(Exception) as raised:
                await group.call("fail", failing, kind)
            if failing == 0:
                assert raised.value is error
            elif kind == "user":
                assert type(raised.value) is UserError and str(raised.value) == str(error)
            else:
                words = f"{type(error).__name__}: {error}"
                assert type(raised.value) is RuntimeError and str(raised.value) == words
            assert f"raised by model rank {failing} in fail" in raised.value.__notes__
    assert await group.call("fail", 3, "user") == [0, 1, 2]
    assert await group.call("get", "all") == [(0, "all"), (1, "all"), (2, "all")]
    assert await group.scatter("get", [(5,), (6,), (7,)]) == [(0, 5), (1, 6), (2, 7)]
    with pytest.raises(ValueError, match="2 shards for 3 data-parallel ranks"):
        await group.scatter("get", [(5,), (6,)])
    await group.call("signal", 2)
    await group.call("get", "all")
    assert signal.SIGTERM in caught


def rank_of_three(rank, port):
    launch = Launch(rank, 3, rank, "127.0.0.1", port)
    launch.join("cpu", LIMIT)
    caught = []
    group = LauncherGroup("model", launch, on_signal=caught.append)
    if rank:
        signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
        group.serve(lambda: caught[0] if caught else 0)
        return
    asyncio.run(drive(group, caught))
    asyncio.run(group.close())


def test_rank_0_gets_the_answers_errors_and_signals_of_all_ranks():
    on_ranks(3, rank_of_three)


def rank_of_four(rank, port):
    launch = Launch(rank, 4, rank, "127.0.0.1", port)
    launch.join("cpu", LIMIT)
    group = LauncherGroup("model", launch, ranks_per_shard=2)
    if rank:
        group.serve()
        return

    async def drive_shards():
        await group.build(Worker, "open")
        assert await group.scatter("get", [(5,), (6,)]) == [(0, 5), (2, 6)]
        assert await group.call("get", 7) == [(0, 7), (1, 7), (2, 7), (3, 7)]
        await group.close()

    asyncio.run(drive_shards())


def test_ranks_that_share_a_shard_all_get_it():
    on_ranks(4, rank_of_four)
