"""Joining a cluster of several nodes: the real Ray, with its nodes on this machine."""

from __future__ import annotations

import asyncio

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from openrl.cluster.group import WorkerContext
from openrl.cluster.placement import ENGINES, RoleRequest, plan_placement, role_requests
from openrl.cluster.ray_cluster import RayCluster, cluster_address, join_cluster, open_cluster
from openrl.cluster.ray_group import RayGroup
from openrl.config.rollout import EngineFlags, PlacementFlags
from openrl.errors import UserError

pytestmark = pytest.mark.slow


class NodeReporter:
    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def where(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), self.context.local_rank


@pytest.fixture(scope="module")
def address():
    """Two nodes of three CPUs each."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    nodes.add_node(num_cpus=3)
    nodes.wait_for_nodes()
    processes = psutil.Process().children(recursive=True)
    yield nodes.address
    nodes.shutdown()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive, "processes left behind"


@pytest.fixture
def joined(address):
    flags = PlacementFlags(actor_num_nodes=2, actor_num_gpus_per_node=2, ray_address=address)
    requests = role_requests(flags, EngineFlags(vllm_num_engines=2), ["actor"])
    cluster, plan = open_cluster(flags, requests, "cpu")
    yield cluster, plan
    cluster.close()


def test_node_groups_lie_on_one_node_each(joined):
    cluster, plan = joined
    assert [(node.cpus, node.free_cpus) for node in cluster.nodes()] == [(3, 3), (3, 3)]

    async def scenario():
        reservation = await cluster.reserve(plan, timeout=60)
        actor = await RayGroup.create(cluster, reservation, "actor", NodeReporter, timeout=60)
        engines = await RayGroup.create(cluster, reservation, ENGINES, NodeReporter, timeout=60)
        return await actor.call("where"), await engines.call("where")

    actor, engines = asyncio.run(scenario())
    assert [local for _, local in actor] == [0, 1, 0, 1]
    nodes = [node for node, _ in actor]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert {node for node, _ in engines} == set(nodes)  # one CPU was left on each


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
        "  - needs 4 CPUs on one node for actor, the largest free node has 3",
        "  - needs 7 CPUs in all, the cluster has 6 free on 2 nodes",
    ]
    assert lines[3].count("0 of 0 GPUs and 3 of 3 CPUs free") == 2  # what was granted in part is given back
    reserve(cluster, [RoleRequest("actor", 2, 3)], timeout=60).release()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:10001", "nonsense"])
def test_no_cluster_at_the_address_is_a_clear_error(address):
    with pytest.raises(UserError, match=f"--ray_address {address}: no Ray cluster answers there"):
        join_cluster(address)


def test_the_flag_goes_before_the_environment(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert cluster_address(PlacementFlags()) is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert cluster_address(PlacementFlags()) == "10.0.0.1:6379"
    assert cluster_address(PlacementFlags(ray_address="10.0.0.2:6379")) == "10.0.0.2:6379"
