"""The files of examples/cluster start scripts that exist, with flags that parse, on as many GPUs as
the scripts ask for."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

import openrl.config.rules.all  # noqa: F401
from openrl.config.commands import COMMANDS, PPOConfig
from openrl.flags.parser import read_words, resolve
from openrl.flags.schema import collect_flags
from tests.golden.test_example_scripts import ROOT, calls_of, filled_in

FOLDER = ROOT / "examples/cluster"
FILES = {path.stem: yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yaml")}


def started(text: str) -> PPOConfig:
    """The configuration of the script that a file starts, with the flags behind its name."""
    name, flags = re.findall(r"bash (?:/opt/openrl/)?examples/scripts/(\w+)\.sh ?([^\n]*)", text)[0]
    (command, words), *_ = calls_of(ROOT / f"examples/scripts/{name}.sh")
    settings, _, problems = read_words([*filled_in(f"{name}.sh", words), *shlex.split(flags)])
    config, found = resolve(
        COMMANDS[command], collect_flags(COMMANDS[command]), settings, environment=False
    )
    assert [str(p) for p in [*problems, *found]] == []
    return config


def gpus(config: PPOConfig) -> int:
    return config.placement.actor_num_nodes * config.placement.actor_num_gpus_per_node


def test_kuberay():
    job = FILES["kuberay"]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    ray = re.search(r"^ray\S*==(\S+)", (ROOT / "requirements/base.txt").read_text(), re.M)
    assert cluster["rayVersion"] == ray[1]
    nodes = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    containers = [node["template"]["spec"]["containers"][0] for node in nodes]
    there = [
        node.get("replicas", 1) * container["resources"]["limits"]["nvidia.com/gpu"]
        for node, container in zip(nodes, containers, strict=True)
    ]
    assert sum(there) == gpus(started(job["spec"]["entrypoint"])) == 16
    mounted = {mount["name"] for mount in containers[0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in nodes[0]["template"]["spec"]["volumes"]}


def test_skypilot():
    task = FILES["skypilot"]
    each = int(task["resources"]["accelerators"].split(":")[1])
    assert task["num_nodes"] * each == gpus(started(task["run"])) == 16


def test_compose():
    service = FILES["compose"]["services"]["train"]
    assert gpus(started(service["command"])) == 1
    build = service["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).is_file()
    assert not service.get("ports"), "nothing listens beyond the machine"


@pytest.mark.parametrize("name", FILES)
def test_no_secret_is_written_down(name):
    text = (FOLDER / f"{name}.yaml").read_text()
    for line in re.findall(r"^.*(?:TOKEN|KEY)\w*:.*$", text, re.M):
        assert re.search(r": *(null)? *(#.*)?$", line), line
