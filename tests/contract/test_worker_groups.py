"""One suite over every kind of worker group, and what only separate processes can show."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from openrl.cluster import watchdog
from openrl.cluster.fork_server import Preload
from openrl.cluster.group import LocalGroup, WorkerContext, WorkerDied, WorkerTimeout
from openrl.cluster.hosts import GroupSettings
from openrl.cluster.planner import RoleRequest, plan_placement
from openrl.cluster.ray_cluster import import_path, start_cluster
from openrl.cluster.ray_group import RayGroup
from openrl.errors import UserError
from tests.patience import PATIENCE, still_running


class PlainWorker:
    def __init__(self, context: WorkerContext, offset: int = 0) -> None:
        if offset < 0:
            raise UserError(f"offset {offset}", "give a positive one")
        self.context, self.offset, self.calls = context, offset, 0
        self.kept: list[object] = []

    def add(self, x: int, y: int = 0) -> tuple[int, int]:
        self.calls += 1
        return self.context.rank, x + y + self.offset

    def count(self) -> int:
        return self.calls

    def parent(self) -> int:
        return os.getppid()

    def fail_on(self, rank: int) -> None:
        if self.context.rank == rank:
            raise UserError("row 7 has no answer", "see --label_key")

    def array(self, number: int) -> object:
        return None if number > 2 else np.full(4, 10 * self.context.rank + number)

    def keep(self, item: object) -> None:
        self.kept.append(item)

    def kept_sums(self) -> list[int]:
        return [int(np.sum(item)) for item in self.kept]

    def pid_of_child(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    def exit_code_of_grandchild(self) -> int:
        """As a child learns it: it inherits how its parent hears of ends."""
        ask = (
            "import subprocess;"
            f" print(subprocess.run({[sys.executable, '-c', 'raise SystemExit(7)']}).returncode)"
        )
        return int(
            subprocess.run([sys.executable, "-c", ask], capture_output=True, check=True).stdout
        )

    def describe(self) -> tuple[WorkerContext, str | None, bool]:
        return self.context, os.environ.get("OMP_NUM_THREADS"), "group_test_plugin" in sys.modules

    def die(self, rank: int, speaks: bool) -> None:
        """On one rank: as the kernel ends a process that takes too much memory, perhaps after an
        error in a thread."""
        if self.context.rank == rank:
            if speaks:
                thread = threading.Thread(target=lambda: 1 / 0)
                thread.start()
                thread.join()
            os.kill(os.getpid(), signal.SIGKILL)

    def die_or_hang(self, rank: int) -> None:
        if self.context.rank == rank:
            print("the last thing I said", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


class AsyncWorker:
    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.waiting, self.given_up = asyncio.Event(), asyncio.Event()

    async def wait_for_ever(self) -> None:
        self.waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up.set()

    async def someone_waits(self) -> bool:
        return await self.waiting.wait()

    async def nobody_waits(self) -> bool:
        return await self.given_up.wait()

    async def hang_on(self, rank: int) -> int:
        if self.context.rank == rank:
            await asyncio.Event().wait()
        return self.context.rank

    async def exit_code_of_grandchild(self) -> int:
        return await asyncio.to_thread(PlainWorker.exit_code_of_grandchild, self)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    plugins = tmp_path_factory.mktemp("plugins")
    (plugins / "group_test_plugin.py").write_text("")
    sys.path.append(str(plugins))
    others = set(psutil.Process().children(recursive=True))  # of tests that ran before
    cluster = start_cluster(num_cpus=8, num_gpus=0)
    yield cluster
    processes = [p for p in psutil.Process().children(recursive=True) if p not in others]
    cluster.close()
    sys.path.remove(str(plugins))
    assert not still_running(processes), "processes left behind"


async def create(cluster, reservation, worker_class, *args, **options) -> RayGroup:
    return await RayGroup.create(
        cluster,
        reservation,
        "tester",
        GroupSettings(PATIENCE, **options),
        worker_class,
        *args,
    )


async def reserve(cluster, size):
    return await cluster.reserve(
        plan_placement([RoleRequest("tester", 1, size)], "cpu", []), timeout=PATIENCE
    )


@asynccontextmanager
async def ray_group(cluster, worker_class, *args, size=2, **options):
    """A group of its own for tests that break it or look at its processes."""
    reservation = await reserve(cluster, size)
    try:
        group = await create(cluster, reservation, worker_class, *args, **options)
        try:
            yield group
        finally:
            await group.close()
    finally:
        reservation.release()


@pytest.fixture(scope="module", params=["local", "ray"])
def make(request):
    """make(worker_class, *args): a group of two, made once per class and arguments."""
    made: dict[tuple, object] = {}
    if request.param == "ray":
        cluster = request.getfixturevalue("cluster")

    async def make_ray(worker_class, *args):
        return await create(cluster, await reserve(cluster, 2), worker_class, *args)

    def of(worker_class, *args):
        key = (worker_class, *args)
        if key not in made:
            if request.param == "local":
                made[key] = LocalGroup.create("tester", 2, worker_class, *args, timeout=PATIENCE)
            else:
                made[key] = asyncio.run(make_ray(worker_class, *args))
        return made[key]

    yield of
    for group in made.values():
        asyncio.run(group.close())


def test_call_gives_every_worker_the_same_arguments_and_keeps_rank_order(make):
    group = make(PlainWorker, 100)
    assert asyncio.run(group.call("add", 1, 20)) == [(0, 121), (1, 121)]


def test_scatter_gives_each_worker_its_own(make):
    group = make(PlainWorker, 100)
    assert asyncio.run(group.scatter("add", [(1,), (2,)])) == [(0, 101), (1, 102)]
    with pytest.raises(ValueError, match=r"tester\.add: 3 shards for 2 data-parallel ranks"):
        asyncio.run(group.scatter("add", [(1,), (2,), (3,)]))


def test_neighbours_that_work_on_the_same_rows_get_one_shard_and_answer_once(make, monkeypatch):
    group = make(PlainWorker, 100)
    monkeypatch.setattr(group, "ranks_per_shard", 2)
    before = asyncio.run(group.call("count"))
    assert asyncio.run(group.scatter("add", [(7,)])) == [(0, 107)]
    assert asyncio.run(group.call("count")) == [calls + 1 for calls in before]
    with pytest.raises(ValueError, match=r"tester\.add: 2 shards for 1 data-parallel ranks"):
        asyncio.run(group.scatter("add", [(1,), (2,)]))


def test_one_worker_can_be_asked_alone(make):
    group = make(PlainWorker, 100)
    before = asyncio.run(group.call("count"))
    assert asyncio.run(group.call_one(0, "add", 5)) == (0, 105)
    assert asyncio.run(group.call("count")) == [before[0] + 1, before[1]]


def test_who_gives_up_waiting_cancels_the_call(make):
    group = make(AsyncWorker)

    async def scenario():
        waiting = asyncio.create_task(group.call_one(1, "wait_for_ever"))
        await group.call_one(1, "someone_waits")
        waiting.cancel()
        assert await group.call_one(1, "nobody_waits")  # hangs if the call goes on

    asyncio.run(scenario())


def test_a_handle_carries_rank_0s_result_to_another_group(make):
    source, target = make(PlainWorker, 100), make(PlainWorker, 200)

    async def scenario():
        number = 1
        while (handle := await source.call_for_handle("array", number)) is not None:
            await target.call("keep", handle)
            number += 1
        return number

    assert asyncio.run(scenario()) == 3
    assert asyncio.run(target.call("kept_sums")) == [[4, 8]] * 2


@pytest.mark.parametrize(
    ("run", "method"),
    [
        (lambda group: group.call("fail_on", 1), "fail_on"),
        (lambda group: group.scatter("fail_on", [(1,), (1,)]), "fail_on"),
        (lambda group: group.call_for_handle("fail_on", 1), "fail_on"),
    ],
)
def test_errors_arrive_as_they_were_raised(make, run, method):
    group = make(PlainWorker, 100)

    async def scenario():
        await run(group)

    with pytest.raises(UserError) as caught:
        asyncio.run(scenario())
    assert type(caught.value) is UserError
    assert (caught.value.message, caught.value.remedy) == ("row 7 has no answer", "see --label_key")
    assert f"raised by tester rank 1 in {method}" in caught.value.__notes__
    assert len(asyncio.run(group.call("count"))) == 2  # and the group goes on


def test_a_timeout_names_role_method_and_ranks(make):
    group = make(AsyncWorker)
    group.timeout = 3  # enough for rank 0 to answer
    try:
        with pytest.raises(
            WorkerTimeout, match=r"tester\.hang_on: no answer from rank 1 of 2 asked within 3 s"
        ):
            asyncio.run(group.call("hang_on", 1))
    finally:
        group.timeout = PATIENCE


# --- what only separate processes can show


def test_workers_know_their_place_and_import_plugins(cluster):
    async def scenario():
        async with ray_group(
            cluster, PlainWorker, plugins=("group_test_plugin",), env={"OMP_NUM_THREADS": "3"}
        ) as group:
            return await group.call("describe")

    places = asyncio.run(scenario())
    for rank, (context, threads, plugin_loaded) in enumerate(places):
        assert (context.role, context.rank, context.world_size, context.local_rank) == (
            "tester",
            rank,
            2,
            rank,
        )
        assert (context.master_addr, context.master_port) == ("127.0.0.1", places[0][0].master_port)
        assert 1024 <= context.master_port < 65536
        assert threads == "3"
        assert plugin_loaded


def test_everything_listens_on_loopback_only(cluster):
    async def scenario():
        async with ray_group(cluster, PlainWorker, size=1):
            return [
                (process.name(), connection.laddr.ip)
                for process in psutil.Process().children(recursive=True)
                for connection in process.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            ]

    servers = asyncio.run(scenario())
    assert servers
    assert {ip for _, ip in servers} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, servers


def test_a_cluster_has_only_the_processes_that_a_run_needs(cluster):
    """Ray would start three more, whose imports take seconds, and wait for one of them."""
    pids = watchdog.cluster_pids(str(cluster.session_dir), cluster.own["raylet"].pid)
    first_words = [psutil.Process(pid).cmdline()[0] for pid in pids if pid != os.getpid()]
    names = [Path(word.strip()).name for word in first_words]
    workers = ("ray::ActorHost", "ray::AsyncActorHost", "ray::IDLE")
    of_ray = sorted(name for name in names if not name.startswith(workers))
    assert of_ray == ["gcs_server", "ray::RuntimeEnvAgent", "raylet", "sleep"]


def test_a_signal_to_the_drivers_process_group_is_for_the_driver_alone(cluster):
    """`timeout` and some init processes of containers send one. It must not end Ray, since the
    driver then has a checkpoint to write."""

    async def scenario():
        async with ray_group(cluster, PlainWorker, size=1):
            return {p.name() for p in psutil.Process().children(recursive=True) if in_group(p)}

    def in_group(process):
        return os.getpgid(process.pid) == os.getpgrp()

    assert not asyncio.run(scenario()) & {"gcs_server", "raylet", "ray::ActorHost"}


@pytest.mark.full
def test_workers_of_one_environment_are_forked_from_one_process(cluster):
    preload = Preload(partial(import_module, "colorsys"))
    path = os.pathsep.join(["/patched", *import_path()])
    environments = ({}, {}, {"OPENRL_TEST_OTHER": "${HOME}/other", "PYTHONPATH": path})

    settings = []

    async def scenario():
        parents = []
        for env in environments:
            async with ray_group(cluster, PlainWorker, preload=preload, env=env) as group:
                parents.append(await group.call("parent"))
                settings.append(psutil.Process(parents[-1][0]).environ())
        return parents

    one, same, other = asyncio.run(scenario())
    assert len({*one, *same}) == len({*other}) == 1 and one[0] != other[0]
    assert all(psutil.Process(pid).ppid() == os.getpid() for pid in (*one, *other))
    # what libraries read at import is what the workers have
    assert settings[2]["OPENRL_TEST_OTHER"] == f"{os.environ['HOME']}/other"
    assert settings[2]["PYTHONPATH"] == path


def test_a_constructor_error_arrives_as_it_was_raised(cluster):
    async def scenario():
        async with ray_group(cluster, PlainWorker, -1):
            pass

    with pytest.raises(UserError, match="offset -1"):
        asyncio.run(scenario())


@pytest.mark.full
def test_a_handle_does_not_hold_the_data(cluster):
    async def scenario():
        async with ray_group(cluster, PlainWorker) as group:
            return type(await group.call_for_handle("array", 1))

    assert asyncio.run(scenario()) is ray.ObjectRef


def test_a_killed_worker_is_named_at_once(cluster):
    async def scenario():
        async with ray_group(cluster, PlainWorker) as group:
            await group.call("die_or_hang", 1)  # rank 0 would hang for ever

    with pytest.raises(
        WorkerDied, match=r"tester rank 1 died in die_or_hang \(process \d+ on 127"
    ) as caught:
        asyncio.run(scenario())
    assert str(caught.value).splitlines()[1:] == ["    the last thing I said"]


@pytest.mark.full
@pytest.mark.parametrize("speaks", [False, True])
def test_the_last_words_are_what_the_worker_said(cluster, tmp_path, speaks):
    """Not the headers of logs, neither Ray's nor our own."""

    async def scenario():
        async with ray_group(cluster, PlainWorker, log_dir=str(tmp_path)) as group:
            await group.call("die", 1, speaks)

    with pytest.raises(WorkerDied) as caught:
        asyncio.run(scenario())
    _, *words, log = str(caught.value).splitlines()
    assert log == f"  its log: {tmp_path / 'tester-1.log'}"
    assert len(words) == (5 if speaks else 0)
    assert not speaks or words[-1] == "    ZeroDivisionError: division by zero"


def test_a_worker_that_died_is_made_anew_in_its_place(cluster):
    """From the same arguments; the others are what they were."""

    async def scenario():
        async with ray_group(cluster, PlainWorker, 100) as group:
            await group.call("add", 1)
            with pytest.raises(WorkerDied) as died:
                await group.call_one(1, "die_or_hang", 1)
            await group.restart(1)
            return died.value.rank, await group.call("count"), await group.call("add", 1)

    assert asyncio.run(scenario()) == (1, [1, 0], [(0, 101), (1, 101)])


def test_this_process_still_learns_how_its_own_children_ended(cluster):
    """Ray ignores SIGCHLD in the driver, which would turn every exit code into 0 or None."""
    assert (
        subprocess.run([sys.executable, "-c", "raise SystemExit(7)"], check=False).returncode == 7
    )


@pytest.mark.full
@pytest.mark.parametrize("worker_class", [PlainWorker, AsyncWorker])
def test_workers_learn_how_their_children_ended(cluster, worker_class):
    """Else a compiler that fails in vLLM's processes, or a program that a reward runs, seems to
    succeed."""

    async def scenario():
        async with ray_group(cluster, worker_class) as group:
            return await group.call("exit_code_of_grandchild")

    assert set(asyncio.run(scenario())) == {7}


def test_closing_ends_the_workers_and_their_children(cluster):
    async def scenario():
        async with ray_group(cluster, PlainWorker) as group:
            children = [psutil.Process(pid) for pid in await group.call("pid_of_child")]
            return children + [child.parent() for child in children]

    assert not still_running(asyncio.run(scenario()))


def test_a_plan_too_large_for_a_local_cluster_is_refused_at_once(cluster):
    plan = plan_placement([RoleRequest("actor", 1, 9), RoleRequest("vllm", 2, 1)], "cpu", [])
    with pytest.raises(UserError) as caught:
        asyncio.run(cluster.reserve(plan, timeout=600))
    assert "needs 9 CPUs on one node for actor, but the largest free node has" in str(caught.value)
    assert "needs 11 CPUs in all" in str(caught.value)
