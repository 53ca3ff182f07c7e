from __future__ import annotations

import re

import pytest

from openrl.cluster.placement import Node, PlacementPlan, text_table
from openrl.cluster.planner import RoleRequest, check_room, plan_placement, role_requests
from openrl.config.groups.placement import HybridFlags, PlacementFlags
from openrl.config.groups.rollout_engine import EngineFlags, ParallelSizes
from openrl.errors import UserError


def gpu_node(name: str, gpus: int, free: int | None = None, cpus: int = 64) -> Node:
    return Node(name, cpus, gpus, cpus, gpus if free is None else free)


def requests(**ranks: tuple[int, int]) -> list[RoleRequest]:
    return [RoleRequest(name, *shape) for name, shape in ranks.items()]


ROLES = ["actor", "critic", "reference", "reward"]


def test_every_rank_gets_a_bundle_of_its_own():
    plan = plan_placement(requests(actor=(2, 2), reference=(1, 1), vllm=(2, 1)), "cuda", [])
    assert plan.node_groups == (2, 2, 1, 1, 1)
    assert plan.bundles_by_role == {
        "actor": (0, 1, 2, 3),
        "reference": (4,),
        "vllm": (5, 6),
    }
    assert plan.need == {"GPU": 7, "CPU": 7}
    assert plan.local_ranks("actor") == [0, 1, 0, 1]
    assert [plan.group_of(b) for b in range(7)] == [0, 0, 1, 1, 2, 3, 4]


def test_on_a_cpu_a_bundle_is_a_worker_slot():
    plan = plan_placement(
        [RoleRequest("actor", 1, None), RoleRequest("vllm", 1, 1)], "cpu", [gpu_node("a", 8)]
    )
    assert plan.need == {"CPU": 2}
    assert plan.notes(cores=2) == []
    assert plan.notes(cores=1) == [
        "2 worker slots on 1 core: ranks share cores, so this is slower, not wrong"
    ]


def test_ranks_left_open_take_every_gpu_of_a_node_busy_ones_too():
    plan = plan_placement(
        [RoleRequest("actor", 2, None)], "cuda", [gpu_node("a", 4), gpu_node("b", 8, free=1)]
    )
    assert plan.node_groups == (8, 8)


def test_flags_left_open_follow_the_actor():
    flags = PlacementFlags(
        actor_num_nodes=2, actor_num_gpus_per_node=4, ref_num_nodes=1, critic_num_gpus_per_node=2
    )
    made = role_requests(
        flags,
        EngineFlags(vllm_num_engines=3),
        ["actor", "critic", "reference", "reward"],
        leaders={},
    )
    assert made == [
        RoleRequest("actor", 2, 4),
        RoleRequest("critic", 2, 2),
        RoleRequest("reference", 1, 4),
        RoleRequest("reward", 2, 4),
        RoleRequest("vllm", 3, 1),
    ]


EIGHT = [gpu_node("a", 8)]
TWICE_FOUR = [gpu_node("a", 4), gpu_node("b", 4)]


@pytest.mark.parametrize(
    ("roles", "cluster", "expected"),
    [
        ({"actor": (1, 4), "vllm": (4, 1)}, EIGHT, []),
        ({"actor": (2, 4)}, EIGHT, []),  # two node groups may share a node
        ({"actor": (2, 4)}, TWICE_FOUR, []),
        ({"actor": (1, 2), "critic": (1, 3), "vllm": (2, 1)}, TWICE_FOUR, []),
        (
            {"actor": (1, 3)},
            [gpu_node("a", 4, free=2), gpu_node("b", 2)],
            ["needs 3 GPUs on one node for actor, but the largest free node has 2"],
        ),
        (
            {"actor": (2, 4), "vllm": (1, 1)},
            EIGHT,
            ["needs 9 GPUs in all, but the cluster has 8 free on 1 node"],
        ),
        (
            {"actor": (1, 3), "critic": (1, 3), "reference": (1, 2)},
            TWICE_FOUR,
            [
                "needs 2 GPUs on one node for reference, after the other roles the nodes have 1, 1"
                " free"
            ],
        ),
        (
            {"actor": (1, 2)},
            [],
            [
                "needs 2 GPUs on one node for actor, but the largest free node has 0",
                "needs 2 GPUs in all, but the cluster has 0 free on 0 nodes",
                "needs 2 CPUs on one node for actor, but the largest free node has 0",
                "needs 2 CPUs in all, but the cluster has 0 free on 0 nodes",
            ],
        ),
        (
            {"actor": (1, 4)},
            [gpu_node("a", 8, cpus=3)],
            [
                "needs 4 CPUs on one node for actor, but the largest free node has 3",
                "needs 4 CPUs in all, but the cluster has 3 free on 1 node",
            ],
        ),
        # the widest first, into the tightest hole: role order alone would put vllm on node a and
        # fail
        ({"vllm": (2, 1), "actor": (1, 4)}, [gpu_node("a", 4), gpu_node("b", 2)], []),
    ],
)
def test_problems_say_what_is_missing(roles, cluster, expected):
    assert plan_placement(requests(**roles), "cuda", cluster).problems(cluster) == expected


def test_the_table_shows_each_role():
    text = plan_placement(requests(actor=(2, 2), vllm=(1, 1)), "cuda", []).render()
    assert text.splitlines()[0] == "Placement on cuda: 5 GPUs, 5 CPUs"
    cells = [line.split() for line in text.splitlines()[2:]]
    assert cells == [
        ["actor", "4", "2", "x", "2", "0-3", "1"],
        ["vllm", "1", "1", "x", "1", "4", "1"],
    ]


def planned(
    roles: list[str],
    cluster: list[Node],
    device: str = "cuda",
    engines: int = 1,
    hybrid=None,
    **flags,
):
    made = role_requests(
        PlacementFlags(**flags),
        EngineFlags(vllm_num_engines=engines),
        roles,
        (hybrid or HybridFlags()).leaders(roles, engines_apart=False),
    )
    return plan_placement(made, device, cluster)


@pytest.mark.parametrize(
    ("hybrid", "need", "shares"),
    [
        ({}, 10, {}),
        ({"colocate_actor_ref": True}, 8, {"actor": 0.5, "reference": 0.5}),
        ({"colocate_critic_reward": True}, 8, {"critic": 0.5, "reward": 0.5}),
        (
            {"colocate_actor_ref": True, "colocate_critic_reward": True},
            6,
            {"actor": 0.5, "reference": 0.5, "critic": 0.5, "reward": 0.5},
        ),
        ({"colocate_all_models": True}, 2, dict.fromkeys([*ROLES, "vllm"], 0.2)),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_colocated_roles_share_bundles_in_equal_parts(hybrid, need, shares, device):
    flags = HybridFlags(**hybrid)
    plan = planned(ROLES, EIGHT, device, engines=2, hybrid=flags, actor_num_gpus_per_node=2)
    assert plan.need["CPU"] == need
    found = {role: plan.share(bundles[0]) for role, bundles in plan.bundles_by_role.items()}
    assert {role: share for role, share in found.items() if share < 1} == shares
    assert [plan.shared(role) for role in plan.bundles_by_role] == [
        role in shares for role in plan.bundles_by_role
    ]
    for role in {"actor", "critic"} & shares.keys():
        partner = {"actor": "reference", "critic": "reward"}[role]
        assert plan.bundles_by_role[role] == plan.bundles_by_role[partner]


def test_shares_of_a_bundle_never_exceed_it():
    plan = planned(
        ["actor", "reference"],
        EIGHT,
        hybrid=HybridFlags(colocate_all_models=True),
        actor_num_gpus_per_node=1,
    )
    assert plan.bundles_by_role == {"actor": (0,), "reference": (0,), "vllm": (0,)}
    assert plan.share(0) == 0.3333


def test_colocated_engines_on_several_nodes_lie_with_the_actor():
    cluster = TWICE_FOUR
    plan = planned(
        ["actor"],
        cluster,
        engines=8,
        hybrid=HybridFlags(colocate_all_models=True),
        actor_num_nodes=2,
    )
    assert plan.node_groups == (4, 4) and plan.problems(cluster) == []
    assert plan.bundles_by_role["vllm"] == plan.bundles_by_role["actor"]


def test_engines_that_cannot_share_are_refused():
    with pytest.raises(
        UserError, match="--vllm_num_engines: 3 engines of one place each cannot fill 4 places"
    ):
        planned(["actor"], TWICE_FOUR, engines=3, hybrid=HybridFlags(colocate_all_models=True))


def test_explicit_places_are_counted_through_the_nodes():
    text = "actor=0-3; ref=0-3; vllm=4,5,6,7"
    plan = planned(["actor", "reference"], TWICE_FOUR, engines=4, placement=text)
    assert plan.node_groups == (4, 4)
    assert plan.bundles_by_role["actor"] == plan.bundles_by_role["reference"] == (0, 1, 2, 3)
    assert plan.bundles_by_role["vllm"] == (4, 5, 6, 7)
    assert [*map(plan.share, range(8))] == [0.5] * 4 + [1] * 4
    assert planned(["actor", "reference"], EIGHT, engines=4, placement=text).node_groups == (8,)
    assert planned(["actor", "reference"], [], "cpu", engines=4, placement=text).node_groups == (8,)


def test_roles_may_overlap_in_part():
    plan = planned(["actor"], EIGHT, engines=2, placement="actor=0-2;vllm=2-3")
    assert [*map(plan.share, plan.bundles_by_role["actor"])] == [1, 1, 0.5]
    assert [*map(plan.share, plan.bundles_by_role["vllm"])] == [0.5, 1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("actor=0-3;vlm=4", "'vlm' is not one of actor, critic, ref, reward, teacher, vllm"),
        ("actor=0;actor=1", "actor is named twice"),
        ("actor=a-b", "'a-b' of actor is neither a number nor a range like 0-3"),
        ("actor=", "'' of actor is neither a number nor a range like 0-3"),
        ("actor=0-1-2", "'0-1-2' of actor is neither a number nor a range like 0-3"),
        ("actor=0,3-1", "'3-1' of actor is neither a number nor a range like 0-3"),
        ("actor=0-2,1", "actor=0-2,1 names a place twice"),
    ],
)
def test_placement_that_cannot_be_read(text, reason):
    with pytest.raises(UserError, match="^" + re.escape(f"--placement: {reason}\n")):
        _ = PlacementFlags(placement=text).explicit_places


def test_no_cell_of_a_table_is_cut():
    cells = [letter * 30 for letter in "abcdef"]
    assert text_table("Wide", cells, [cells]).split() == ["Wide", *cells, *cells]
    assert "[/red] :smile:" in text_table("T", ["name"], [["[/red] :smile:"]])


def test_a_plan_of_a_hundred_thousand_ranks():
    """Each engine of 16 places spans two of the nodes, which the actor shares with none."""
    models, count = tuple(range(100_000)), 25_000
    engines = tuple(range(100_000, 200_000))
    sizes = {"vllm": ParallelSizes(16)}
    rows = {"actor": models, "vllm": engines}
    plan = PlacementPlan("cuda", (8,) * count, rows, sizes)
    nodes = [Node(f"n{i}", 8, 8, 8, 8) for i in range(count)]
    assert plan.problems(nodes) == []
    assert plan.problems(nodes[1:])[0].startswith("needs 200000 GPUs in all, but the cluster has")
    assert plan.joined_groups()[12_500:12_502] == [(12_500, 12_501), (12_502, 12_503)]
    assert plan.roles_of(12_499) == "actor" and plan.roles_of(12_500) == "vllm"
    assert sum(map(plan.share, models)) == 100_000 and "12500 x 8" in plan.render()


def test_a_machine_without_memory_for_the_processes_starts_none():
    plan = PlacementPlan("cpu", (30,), {"actor": tuple(range(20)), "vllm": tuple(range(20, 30))})
    check_room(plan, 8 * 2**30)
    with pytest.raises(UserError, match=r"30 ranks .* at least 8 GiB of memory, but .* has 7"):
        check_room(plan, 7 * 2**30)
