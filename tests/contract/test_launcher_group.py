"""An error on one of two ranks that a launcher has started reaches both."""

from __future__ import annotations

import asyncio
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
    def __init__(self, context):
        self.rank = context.rank

    def fail(self, rank, kind):
        if self.rank == rank:
            raise ERRORS[kind]
        return self.rank


def driver(rank, port):
    launch = Launch(rank, 2, rank, "127.0.0.1", port)
    launch.join("cpu", LIMIT)
    group = LauncherGroup("model", launch, Worker)

    async def run():
        for failing in range(2):
            for kind, error in ERRORS.items():
                with pytest.raises(Exception) as caught:
                    await group.call("fail", failing, kind)
                if rank == failing:
                    assert caught.value is error
                elif kind == "user":
                    assert type(caught.value) is UserError and str(caught.value) == str(error)
                else:
                    words = f"{type(error).__name__}: {error}"
                    assert type(caught.value) is RuntimeError and str(caught.value) == words
                note = f"raised by model rank {failing} in fail"
                assert note in caught.value.__notes__
        assert await group.call("fail", 2, "user") == [0, 1]
        await group.close()

    asyncio.run(run())


def test_both_ranks_raise_what_one_of_them_raised():
    on_ranks(2, driver)
