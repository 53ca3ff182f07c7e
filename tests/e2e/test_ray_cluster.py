"""The main command on a cluster that runs already: the real Ray, two nodes of two CPUs each on this
machine."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

from tests.e2e.runs import make_task, metrics, ppo_flags, run
from tests.patience import still_running
from tests.ray_forks import forking_cluster, import_all_but_vllm

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def cluster():
    node = {"num_cpus": 2}
    with forking_cluster(node, node, imports=import_all_but_vllm) as nodes:
        yield nodes


def flags(task: Path, out: Path, cluster: Cluster, **changes: object) -> list[str]:
    """One actor, one reference, one engine: three CPUs, so more than a node has."""
    given = {"ray_address": cluster.address, "rollout_backend": "hf", "max_steps": 2}
    return ppo_flags(task, out, **(given | changes))


def busy() -> set[psutil.Process]:
    """Processes that this test has started: the cluster's servers and what runs on it, without
    Ray's pool of idle ones."""
    return {
        p for p in psutil.Process().children(recursive=True) if name(p) not in ("ray::IDLE", None)
    }


def name(process: psutil.Process) -> str | None:
    """None once it has ended."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return None


def test_a_cluster_that_cannot_hold_the_plan_is_told_apart(cluster, task, tmp_path):
    before = busy()
    changes = {"ref_num_gpus_per_node": 3, "placement_timeout": 5}
    output = run("train_ppo_ray", flags(task, tmp_path, cluster, **changes), code=1)
    message = output[output.index("train_ppo_ray: ") :].splitlines()
    assert message[:3] == [
        "train_ppo_ray: the cluster cannot hold the placement within 5 s (--placement_timeout):",
        "  - needs 3 CPUs on one node for reference, but the largest free node has 2",
        "  - needs 5 CPUs in all, but the cluster has 4 free on 2 nodes",
    ]
    assert message[3].count("2 of 2 CPUs free") == 2
    assert message[4].startswith("  try: lower --*_num_nodes")
    assert "Traceback" not in output
    leaves_the_cluster_as_it_was(before)


def test_a_run_over_two_nodes(cluster, task, tmp_path):
    before = busy()
    output = run("train_ppo_ray", flags(task, tmp_path, cluster))
    assert [m["step"] for m in metrics(tmp_path)] == [1, 2]
    assert all(m["actor/logprob_gap_max"] < 1e-4 for m in metrics(tmp_path))
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 2
    assert (tmp_path / "model.safetensors").is_file() and "tiny 2/2" in output
    assert "it/s]" not in output and "examples/s]" not in output  # libraries draw no bars into ours
    leaves_the_cluster_as_it_was(before)


def test_a_reward_that_fails_ends_the_run_with_one_message(cluster, task, tmp_path):
    """The error comes from a worker's process."""
    before = busy()
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels, responses):\n"
        "    raise ValueError(f'no verdict on {labels[0]}')\n"
    )
    changes = {"remote_rm_url": tmp_path / "reward.py", "reward_failure_policy": "fail"}
    output = run("train_ppo_ray", flags(task, tmp_path / "out", cluster, **changes), code=1)
    message = output[output.index("train_ppo_ray: ") :]
    assert message.startswith("train_ppo_ray: a reward failed: reward: ValueError: no verdict on ")
    assert "(reward.py, line 2)" in message
    assert "  row       train:" in message and "  response  " in message
    assert message.count("\n") < 10 and "Traceback" not in output
    leaves_the_cluster_as_it_was(before)


def leaves_the_cluster_as_it_was(before: set[psutil.Process]) -> None:
    """Its processes live, those of the run are gone."""
    still_running(busy() - before)
    assert busy() == before
