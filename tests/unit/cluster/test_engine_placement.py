"""Engines that are divided over several places: where each lies on a table of clusters, and what
cannot be."""

import pytest

from openrl.cluster.placement import PlacementPlan, match_bundles
from openrl.cluster.planner import plan_placement, role_requests
from openrl.config.groups.placement import HybridFlags, PlacementFlags
from openrl.config.groups.rollout_engine import EngineFlags
from openrl.errors import UserError
from tests.unit.cluster.test_placement import gpu_node

ONE = [gpu_node("a", 1)]
ONE_NODE = [gpu_node("a", 8)]
TWO_NODES = [gpu_node(name, 8) for name in "ab"]
FOUR_NODES = [gpu_node(name, 8) for name in "abcd"]
UNEVEN = [gpu_node("a", 8), gpu_node("b", 4)]

COLOCATED = HybridFlags(colocate_all_models=True)


def plan(
    cluster,
    hybrid=HybridFlags(),
    device="cuda",
    engines=None,
    sizes=(1, 1, 1),
    placement=None,
    **flags,
):
    tensor, pipeline, data = sizes
    engine = EngineFlags(
        vllm_num_engines=engines,
        vllm_tensor_parallel_size=tensor,
        vllm_pipeline_parallel_size=pipeline,
        vllm_data_parallel_size=data,
    )
    requests = role_requests(
        PlacementFlags(placement=placement, **flags),
        engine,
        ["actor"],
        hybrid.leaders(["actor"], engines_apart=False),
    )
    return plan_placement(requests, device, cluster)


def engines_of(made: PlacementPlan) -> list[tuple[str, str]]:
    """(places, node groups) of each engine."""
    return [
        (
            made.show_bundles("vllm", rank),
            "".join(map(str, made.groups_of(made.of_rank("vllm", rank)))),
        )
        for rank in range(made.size("vllm"))
    ]


@pytest.mark.parametrize(
    ("cluster", "options", "node_groups", "engines"),
    [
        (ONE, {"hybrid": COLOCATED}, (1,), [("0", "0")]),
        (
            ONE_NODE,
            {"hybrid": COLOCATED, "sizes": (2, 1, 1)},
            (8,),
            [("0-1", "0"), ("2-3", "0"), ("4-5", "0"), ("6-7", "0")],
        ),
        (ONE_NODE, {"hybrid": COLOCATED, "sizes": (2, 2, 2)}, (8,), [("0-7", "0")]),
        (
            ONE_NODE,
            {"actor_num_gpus_per_node": 4, "engines": 2, "sizes": (2, 1, 1)},
            (4, 2, 2),
            [("4-5", "1"), ("6-7", "2")],
        ),
        (ONE_NODE, {"placement": "actor=0-3;vllm=4-7", "sizes": (2, 1, 1)}, (8,), [("4-5", "0"), ("6-7", "0")]),
        (
            TWO_NODES,
            {"actor_num_nodes": 2, "hybrid": COLOCATED, "sizes": (4, 1, 1)},
            (8, 8),
            [("0-3", "0"), ("4-7", "0"), ("8-11", "1"), ("12-15", "1")],
        ),
        # one engine over both nodes: a tensor-parallel group on each
        (
            TWO_NODES,
            {"actor_num_nodes": 2, "hybrid": COLOCATED, "sizes": (8, 2, 1)},
            (8, 8),
            [("0-7 and 8-15", "01")],
        ),
        (TWO_NODES, {"actor_num_nodes": 2, "hybrid": COLOCATED, "sizes": (16, 1, 1)}, (8, 8), [("0-7 and 8-15", "01")]),
        (
            FOUR_NODES,
            {"actor_num_nodes": 2, "engines": 1, "sizes": (8, 2, 1)},
            (8, 8, 8, 8),
            [("16-23 and 24-31", "23")],
        ),
        (
            FOUR_NODES,
            {"actor_num_nodes": 4, "hybrid": COLOCATED, "sizes": (8, 2, 1)},
            (8, 8, 8, 8),
            [("0-7 and 8-15", "01"), ("16-23 and 24-31", "23")],
        ),
        # whole tensor-parallel groups on each node: the rest lies on a smaller one
        (UNEVEN, {"actor_num_gpus_per_node": 1, "engines": 1, "sizes": (4, 1, 1)}, (1, 4), [("1-4", "1")]),
        (
            [gpu_node("a", 8), gpu_node("b", 8), gpu_node("c", 4)],
            {"actor_num_gpus_per_node": 8, "engines": 1, "sizes": (4, 3, 1)},
            (8, 8, 4),
            [("8-15 and 16-19", "12")],
        ),
        # places counted through nodes of 8: each stage on its own node
        (
            TWO_NODES,
            {"placement": "actor=0-3;vllm=4-11", "sizes": (4, 2, 1)},
            (8, 4),
            [("4-7 and 8-11", "01")],
        ),
        ([], {"device": "cpu", "hybrid": COLOCATED, "actor_num_gpus_per_node": 4, "sizes": (2, 1, 1)}, (4,),
            [("0-1", "0"), ("2-3", "0")]),
    ],
)  # fmt: skip
def test_where_engines_lie(cluster, options, node_groups, engines):
    made = plan(cluster, **options)
    assert made.node_groups == node_groups
    assert engines_of(made) == engines
    if cluster:
        assert made.problems(cluster) == []


def test_engines_of_several_places_share_each_of_them():
    made = plan(TWO_NODES, COLOCATED, sizes=(4, 1, 1), actor_num_nodes=2)
    assert {*map(made.share, made.bundles_by_role["actor"])} == {0.5}
    assert made.bundles_by_role["vllm"] == made.bundles_by_role["actor"]
    assert made.size("vllm") == 4 and made.size("actor") == 16
    assert made.local_ranks("vllm") == [0, 1, 0, 1]


def test_what_one_engine_lies_on_is_granted_together():
    apart = plan(TWO_NODES, COLOCATED, sizes=(8, 1, 1), actor_num_nodes=2)
    assert apart.joined_groups() == [(0,), (1,)]
    joined = plan(FOUR_NODES, sizes=(8, 2, 1), engines=1, actor_num_nodes=2)
    assert joined.joined_groups() == [(0,), (1,), (2, 3)]
    assert [joined.spans_nodes("vllm", 0), joined.spans_nodes("actor", 0)] == [True, False]


@pytest.mark.parametrize(
    ("cluster", "options", "message"),
    [
        (ONE_NODE, {"hybrid": COLOCATED, "sizes": (3, 1, 1)}, r"--colocate_all_models, --vllm_tensor_parallel_size: 8 places cannot be divided into engines of 3 places \(tensor 3\) each"),
        (ONE_NODE, {"hybrid": COLOCATED, "sizes": (2, 1, 1), "engines": 8},
            r"--colocate_all_models, --vllm_num_engines: 8 engines of 2 places \(tensor 2\) each cannot fill 8 places"),
        # 6 + 2 of the second engine
        (TWO_NODES, {"placement": "actor=0-1;vllm=2-13", "sizes": (4, 1, 1)},
            r"vllm 1 has a tensor-parallel group on two nodes \(6-7 and 8-9\), although 4 places fit on one"),
        (TWO_NODES, {"actor_num_nodes": 2, "hybrid": COLOCATED, "sizes": (8, 1, 2)},
            r"vllm 0 would span several nodes \(0-7 and 8-15\), but the replicas of an engine must be on one node"),
        ([], {"device": "cpu", "actor_num_nodes": 2, "hybrid": COLOCATED, "sizes": (2, 1, 1)},
            r"vllm 0 would span several nodes \(0 and 1\), but on a CPU an engine needs all its places on one node"),
    ],
)  # fmt: skip
def test_engines_that_cannot_lie_so(cluster, options, message):
    with pytest.raises(UserError, match=message):
        plan(cluster, **options)


def test_an_engine_wider_than_the_cluster():
    made = plan(ONE_NODE, sizes=(8, 2, 1), engines=1, actor_num_gpus_per_node=1)
    assert "needs 17 GPUs in all, but the cluster has 8 free on 1 node" in made.problems(ONE_NODE)
    wide = plan(UNEVEN, sizes=(4, 1, 1), engines=2, actor_num_gpus_per_node=8)
    assert wide.problems(UNEVEN) == ["needs 16 GPUs in all, but the cluster has 12 free on 2 nodes"]


def test_the_table_names_the_places_of_each_engine():
    def line(made: PlacementPlan) -> str:
        return next(text for text in made.render().splitlines() if text.startswith("vllm"))

    made = plan(ONE_NODE, COLOCATED, sizes=(4, 1, 1))
    assert line(made).split() == ["vllm", "2", "1", "x", "2", "0-3;", "4-7", "4", "x", "0.5"]
    made = plan(FOUR_NODES, sizes=(8, 2, 1), engines=1, actor_num_nodes=2)
    assert line(made).split() == [
        "vllm",
        "1",
        "2",
        "x",
        "1/2",
        "16-23",
        "and",
        "24-31",
        "16",
        "x",
        "1",
    ]
    many = plan(
        [gpu_node(str(i), 8) for i in range(16)], COLOCATED, sizes=(2, 1, 1), actor_num_nodes=16
    )
    assert line(many).split() == [
        "vllm",
        "64",
        "16",
        "x",
        "4",
        "0-127,",
        "2",
        "each",
        "2",
        "x",
        "0.5",
    ]


@pytest.mark.parametrize(
    ("sizes", "nodes", "expected"),
    [
        ([2, 2], "abab", [[0, 2], [1, 3]]),
        # the tightest first, else 6 - 4 is wasted
        ([4, 3, 3], "bbbbbbaaaa", [[6, 7, 8, 9], [0, 1, 2], [3, 4, 5]]),
        ([2, 2], "aaab", None),
        ([4, 4], "aaaaaaaa", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_granted_bundles_are_matched_with_node_groups(sizes, nodes, expected):
    assert match_bundles(sizes, list(nodes)) == expected
