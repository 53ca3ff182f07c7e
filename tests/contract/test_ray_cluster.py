"""Joining a cluster of several nodes: the real Ray, with its nodes on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from openrl.cluster.group import WorkerContext
from openrl.cluster.hosts import GroupSettings
from openrl.cluster.planner import RoleRequest, plan_placement, role_requests
from openrl.cluster.ray_cluster import RayCluster, join_cluster, open_cluster
from openrl.cluster.ray_group import RayGroup
from openrl.config.groups.placement import ENGINES, PlacementFlags
from openrl.config.groups.rollout_engine import EngineFlags
from openrl.errors import UserError
from tests.patience import PATIENCE, still_running
from tests.ray_forks import forking_cluster, import_all_but_vllm

pytestmark = pytest.mark.full


class NodeReporter:
    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def where(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), self.context.local_rank

    def directory(self) -> str:
        return str(Path.cwd())


class Engine:
    """Where it lies, and where the processes would that vLLM starts for it."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def where(self) -> tuple[str, str]:
        return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def workers(self) -> list[tuple[str, list[int]]]:
        """As vLLM's executor over Ray does: one worker in each bundle of the group that it finds
        itself in."""
        assert self.context.spans_nodes
        share, group = (
            float(os.environ["VLLM_RAY_PER_WORKER_GPUS"]),
            ray.util.get_current_placement_group(),
        )
        place = ray.remote(lambda: (ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()))
        return ray.get(
            [
                place.options(
                    num_cpus=0,
                    num_gpus=share,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, int(bundle)),
                ).remote()
                for bundle in os.environ["VLLM_RAY_BUNDLE_INDICES"].split(",")
            ]
        )


@pytest.fixture(scope="module")
def address():
    """Two nodes of three CPUs each, which pass for owners of two GPUs."""
    before = psutil.Process().children(recursive=True)
    node = {"num_cpus": 3, "num_gpus": 2}
    with forking_cluster(node, node, imports=import_all_but_vllm) as cluster:
        processes = set(psutil.Process().children(recursive=True)) - {*before}
        yield cluster.address
    assert not still_running(processes), "processes left behind"


@pytest.fixture
def joined(address):
    flags = PlacementFlags(actor_num_nodes=2, actor_num_gpus_per_node=2, ray_address=address)
    requests = role_requests(flags, EngineFlags(vllm_num_engines=2), ["actor"], leaders={})
    cluster, plan = open_cluster(flags, requests, "cpu")
    yield cluster, plan
    cluster.close()


def test_node_groups_lie_on_one_node_each(joined):
    cluster, plan = joined
    assert [(node.cpus, node.free_cpus) for node in cluster.nodes()] == [(3, 3), (3, 3)]

    async def scenario():
        reservation = await cluster.reserve(plan, timeout=PATIENCE)
        actor = await RayGroup.create(cluster, reservation, "actor", PATIENT, NodeReporter)
        engines = await RayGroup.create(cluster, reservation, ENGINES, PATIENT, NodeReporter)
        return await actor.call("where"), await engines.call("where")

    actor, engines = asyncio.run(scenario())
    assert [local for _, local in actor] == [0, 1, 0, 1]
    nodes = [node for node, _ in actor]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert {node for node, _ in engines} == set(nodes)  # one CPU was left on each


PATIENT = GroupSettings(PATIENCE)


async def start(cluster: RayCluster, sizes: EngineFlags) -> tuple[RayGroup, RayGroup]:
    """An actor on all four GPUs, and the engines beside it."""
    flags = PlacementFlags(actor_num_nodes=2, actor_num_gpus_per_node=2)
    plan = plan_placement(
        role_requests(flags, sizes, ["actor"], {ENGINES: "actor"}), "cuda", cluster.nodes()
    )
    reservation = await cluster.reserve(plan, timeout=PATIENCE)
    actor = await RayGroup.create(cluster, reservation, "actor", PATIENT, Engine)
    return actor, await RayGroup.create(cluster, reservation, ENGINES, PATIENT, Engine)


def test_an_engine_sees_the_gpus_of_all_its_places(joined):
    async def scenario():
        actor, engines = await start(joined[0], EngineFlags(vllm_tensor_parallel_size=2))
        return await actor.call("where"), await engines.call("where")

    actor, engines = asyncio.run(scenario())
    assert [len(gpus.split(",")) for _, gpus in actor] == [1, 1, 1, 1]
    for rank, (node, gpus) in enumerate(engines):
        beside = actor[2 * rank : 2 * rank + 2]
        assert [node, node] == [place for place, _ in beside]
        assert gpus.split(",") == [own for _, own in beside] and set(gpus.split(",")) == {"0", "1"}


def test_an_engine_on_two_nodes_finds_its_places(joined):
    async def scenario():
        actor, engines = await start(
            joined[0], EngineFlags(vllm_tensor_parallel_size=2, vllm_pipeline_parallel_size=2)
        )
        return await actor.call("where"), await engines.call("where"), await engines.call("workers")

    actor, ((home, gpus),), (workers,) = asyncio.run(scenario())
    assert [
        (node, str(*own)) for node, own in workers
    ] == actor  # stage by stage beside the ranks of the actor
    assert home == workers[0][0] == workers[1][0] != workers[2][0] == workers[3][0]
    assert gpus == ""


def reserve(cluster: RayCluster, requests: list[RoleRequest], timeout: float):
    plan = plan_placement(requests, "cpu", cluster.nodes())
    return asyncio.run(cluster.reserve(plan, timeout))


def test_a_plan_that_never_fits_ends_with_what_is_missing(joined):
    cluster, _ = joined
    with pytest.raises(UserError) as caught:
        reserve(cluster, [RoleRequest("actor", 1, 4), RoleRequest("critic", 1, 3)], timeout=1)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the cluster cannot hold the placement within 1 s (--placement_timeout):"
    assert lines[1:3] == [
        "  - needs 4 CPUs on one node for actor, but the largest free node has 3",
        "  - needs 7 CPUs in all, but the cluster has 6 free on 2 nodes",
    ]
    # what was granted in part is given back
    assert lines[3].count("2 of 2 GPUs, 3 of 3 CPUs free") == 2
    reserve(cluster, [RoleRequest("actor", 2, 3)], timeout=PATIENCE).release()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:10001", "nonsense"])
def test_no_cluster_at_the_address_is_a_clear_error(address):
    with pytest.raises(UserError, match=f"--ray_address {address}: no Ray cluster answers there"):
        join_cluster(address)


def test_the_flag_goes_before_the_environment(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert PlacementFlags().address is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert PlacementFlags().address == "10.0.0.1:6379"
    assert PlacementFlags(ray_address="10.0.0.2:6379").address == "10.0.0.2:6379"


JOIN = """
import asyncio, json, sys
from openrl.cluster.planner import RoleRequest, plan_placement
from openrl.cluster.ray_cluster import join_cluster
from openrl.cluster.hosts import GroupSettings
from openrl.cluster.ray_group import RayGroup
from tests.contract.test_ray_cluster import NodeReporter
from tests.patience import PATIENCE

async def main():
    cluster = join_cluster(sys.argv[1])
    plan = plan_placement([RoleRequest("actor", 1, 1)], "cpu", cluster.nodes())
    actor = await RayGroup.create(cluster, await cluster.reserve(plan, PATIENCE), "actor", GroupSettings(PATIENCE), NodeReporter)
    print(json.dumps(await actor.call("directory")))
    await actor.close()
    cluster.close()

asyncio.run(main())
"""


def test_a_cluster_of_ray_start_is_joined_with_its_token_and_works_in_our_directory(tmp_path):
    """`ray start --head` guards the cluster once ~/.ray holds a token, and its workers begin in its
    own directory."""
    home, ours = tmp_path / "home", tmp_path / "ours"
    ours.mkdir()
    (home / ".ray").mkdir(parents=True)
    (home / ".ray/auth_token").write_text("0123456789abcdef" * 4)
    unset = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"}
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env |= {"HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])}
    start = [
        Path(sys.executable).parent / "ray",
        "start",
        "--head",
        "--port",
        "0",
        "--num-cpus",
        "2",
    ]
    before = set(psutil.process_iter())
    options = {"env": env, "capture_output": True, "text": True, "timeout": PATIENCE, "check": True}
    started = subprocess.run(
        [*start, "--include-dashboard", "false", "--disable-usage-stats"], cwd=home, **options
    )
    try:
        address = started.stdout.split("--address='")[1].split("'")[0]
        joined = subprocess.run([sys.executable, "-c", JOIN, address], cwd=ours, **options)
        assert json.loads(joined.stdout.splitlines()[-1]) == [str(ours)]
    finally:
        for process in set(psutil.process_iter()) - before:
            with contextlib.suppress(psutil.Error):  # others on this machine come and go
                if "ray" in " ".join(process.cmdline()) and str(home) in str(
                    process.environ().get("HOME")
                ):
                    process.kill()
