"""Whole runs in this process, on DeepSpeed and transformers' generation: whoever sleeps, they end
bit for bit alike.

Placement and flags are those of a run; only its processes are missing.
``tests/e2e/test_placements.py`` has the processes, and the rollout engines' contract vLLM's sleep."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import pytest
import torch
from safetensors.torch import load_file

from openrl.cli import train_ppo_ray
from openrl.cli.run import command
from openrl.cluster.group import LocalGroup
from openrl.cluster.placement import Node
from openrl.cluster.planner import plan_placement, role_requests
from openrl.config.commands import PPOConfig
from openrl.config.derived import leaders
from openrl.trainer.launch import train
from openrl.workers.profiling import MemoryLog
from openrl.workers.residency import Residency, ResidencyTable
from openrl.workers.roles import (
    Roles,
    assign_roles,
    sleep_parts,
    start_waves,
    worker_arguments,
)
from tests.e2e.runs import SMALL_STEPS, make_task, metrics, ppo_flags, untimed

pytestmark = pytest.mark.full

RUN = {
    "advantage_estimator": "gae",
    "rollout_backend": "hf",
    "init_kl_coef": 0.1,
    "param_dtype": "bf16",
    **SMALL_STEPS,
    "generate_max_len": 6,
    "save_steps": 1,
}
WHOLE = {"deepspeed_sleep_states": ("param", "optim", "grad")}
MODES: dict[str, dict[str, object]] = {
    "all, engines asleep": {"colocate_all_models": True, "vllm_enable_sleep": True},
    "all, both asleep": {
        "colocate_all_models": True,
        "vllm_enable_sleep": True,
        "deepspeed_enable_sleep": True,
    },
    "all, everything asleep": {
        "colocate_all_models": True,
        "vllm_enable_sleep": True,
        "deepspeed_enable_sleep": True,
        "ref_reward_offload": True,
        **WHOLE,
    },
    "actor and reference": {
        "colocate_actor_ref": True,
        "deepspeed_enable_sleep": True,
        "ref_reward_offload": True,
        **WHOLE,
    },
    "explicit": {
        "placement": "actor=0;ref=1;critic=1;vllm=0",
        "vllm_enable_sleep": True,
        "deepspeed_enable_sleep": True,
        "ref_reward_offload": True,
    },
}


STEP = [
    "wake vllm.cache, vllm.weights for collect",
    "sleep vllm.cache, vllm.weights for forward reference",
    "wake reference.param for forward reference",
    "sleep reference.param for forward critic",
    "wake critic.param for forward critic",
    "sleep critic.param for forward actor",
    "wake actor.param for forward actor",
    "wake actor.grad, actor.optim for train actor",
    "sleep actor.grad, actor.optim, actor.param for train critic",
    "wake critic.grad, critic.optim, critic.param for train critic",
    "sleep critic.grad, critic.optim, critic.param for publish",
    "wake vllm.weights for publish",
    "wake actor.param for publish",
    "sync",
    "sleep vllm.weights for save actor",
    "wake actor.optim for save actor",
    "sleep actor.optim, actor.param for save critic",
    "wake critic.optim, critic.param for save critic",
]
"""The edges of a step that ends with a checkpoint, in their order."""


@contextlib.asynccontextmanager
async def in_this_process(
    config: PPOConfig, device, optimizer_steps: int, stage
) -> AsyncIterator[Roles]:
    """As ``start_roles``, with one worker of each role, here."""
    requests = role_requests(config.placement, config.engine, config.model_roles, leaders(config))
    plan = plan_placement(requests, device, [Node("here", 8, 0, 8, 0)])
    made_of, groups = worker_arguments(config, device, optimizer_steps, plan), {}
    residency = Residency(
        ResidencyTable.of(plan, sleep_parts(config)),
        MemoryLog() if config.rl_logging.log_memory else None,
    )
    try:
        for role in (role for wave in start_waves(plan, residency.table) for role in wave):
            worker_class, *arguments = made_of[role]
            groups[role] = LocalGroup.create(role, 1, worker_class, *arguments)
            await groups[role].call("start")
            await residency.started(role, groups[role])
        yield assign_roles(config, groups, residency)
    finally:
        for group in groups.values():
            await group.close()


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def awake(task, tmp_path_factory):
    return outcome(task, tmp_path_factory.mktemp("awake"))


def outcome(task, out, **changes):
    """(metrics that time has no part in, weights, state of the actor) that a run leaves."""
    argv = ppo_flags(task, out, **RUN, **changes)
    run = lambda config, inputs: asyncio.run(train(config, inputs, in_this_process))  # noqa: E731
    assert command(PPOConfig, train_ppo_ray.prepare, run, argv=argv) == 0
    state = out / "checkpoints/step_000002/actor/rank_00000.safetensors"
    return untimed(metrics(out)), load_file(out / "model.safetensors"), load_file(state)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


@pytest.mark.parametrize("mode", MODES)
def test_sleep_changes_no_bit_of_a_run(task, awake, tmp_path, capsys, mode):
    capsys.readouterr()
    steps, weights, state = outcome(task, tmp_path, **MODES[mode], log_memory=True)
    assert steps == awake[0] and same(weights, awake[1]) and same(state, awake[2])
    edges = re.findall(
        r"^memory after ([^|]+?) \|.* host [\d.]+ GiB$", capsys.readouterr().out, re.MULTILINE
    )
    assert [edge for edge in edges if edge.startswith("load")] and edges.count("sync") == 3
    moved = [sum(edge.startswith(direction) for edge in edges) for direction in ("sleep", "wake")]
    assert min(moved) >= 4  # each of two steps moves something out and in
    if mode == "all, everything asleep":
        first = edges.index(STEP[0])
        assert edges[first : first + len(STEP)] == STEP
    assert {"perf/sleep_seconds", "perf/wake_seconds", "perf/memory_host_gib"} <= metrics(tmp_path)[
        -1
    ].keys()


def test_a_resume_finds_everybody_awake_who_must_be(task, awake, tmp_path):
    mode = MODES["all, everything asleep"]
    outcome(task, tmp_path, **mode)
    (tmp_path / "checkpoints/step_000002").rename(tmp_path / "step_000002")
    steps, weights, state = outcome(task, tmp_path, **mode, load_checkpoint=True)
    assert steps == awake[0] and same(weights, awake[1]) and same(state, awake[2])
