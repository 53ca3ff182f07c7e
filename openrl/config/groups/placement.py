"""Flags of places: which role runs on which GPUs, and what sleeps there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Literal

from openrl.config.conditions import (
    CRITIC,
    CRITIC_AND_REWARD,
    FROZEN_MODEL,
    LAUNCHER,
    RAY,
    REFERENCE,
    REWARD_MODEL,
    SECOND_REFERENCE,
    VLLM,
)
from openrl.errors import UserError
from openrl.flags.schema import Conditions, flag, given, group
from openrl.flags.values import SECONDS_OR_0

ModelPart = Literal["param", "optim", "grad"]
"""The parts of a model that sleep and wake independently."""

ENGINES = "vllm"
"""The role of the rollout engines."""

MOST_PLACES = 100_000
"""The most GPUs that a cluster may have; a larger number is a typing error."""

NODES, PER_NODE = "(0, 4096]", "(0, 256]"
"""The bounds of a role's nodes, and of its GPUs on each: planning takes memory for every place."""

LAUNCHER_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""What a launcher such as torchrun sets in the environment of each process."""


def has_launcher() -> bool:
    """Return whether a launcher started this process as one of several ranks."""
    return os.environ.keys() >= LAUNCHER_VARIABLES


FLAG_NAMES = {
    "actor": "actor",
    "critic": "critic",
    "reference": "ref",
    "reward": "reward",
    "teacher": "teacher",
    ENGINES: ENGINES,
}
"""Role -> its name in flags."""


@group("Placement")
class ClusterFlags:
    ray_address: str | None = flag(
        None,
        "Ray cluster to join. None: $RAY_ADDRESS; without it, a cluster starts and stops with the"
        " run.",
    )
    rpc_timeout: int = flag(
        3600,
        "Seconds to wait for a worker's answer before the run stops and names the missing"
        " workers. 0: no limit.",
        bounds=SECONDS_OR_0,
        only_if=RAY,
    )
    placement_timeout: int = flag(
        600,
        "Seconds to wait for the cluster to grant the placement before the run stops and says"
        " what is missing. 0: no limit.",
        bounds=SECONDS_OR_0,
        only_if=RAY,
    )

    @property
    def address(self) -> str | None:
        """Address of the cluster to join, --ray_address or $RAY_ADDRESS; None starts a new one."""
        return self.ray_address or os.environ.get("RAY_ADDRESS") or None


TEACHER_MODEL = given("teacher_pretrain") | given("teacher_routing")
OWN_REFERENCE = (REFERENCE, SECOND_REFERENCE)


def as_the_actor(what: str, bounds: str, only_if: Conditions) -> Any:
    return flag(None, f"{what} group. None: as the actor.", bounds=bounds, only_if=only_if)


@group("Placement")
class PlacementFlags(ClusterFlags):
    system_envs: tuple[str, ...] = flag(
        (),
        "Environment variables for every process of the run, e.g. NCCL_DEBUG=WARN; they override"
        " openrl's own.",
    )
    actor_num_nodes: int = flag(1, "Nodes of the actor group.", bounds=NODES)
    actor_num_gpus_per_node: int | None = flag(
        None,
        "GPUs per node of the actor group; on a CPU, worker slots. None: every GPU of the node; 1"
        " on a CPU.",
        bounds=PER_NODE,
    )
    critic_num_nodes: int | None = as_the_actor("Nodes of the critic", NODES, CRITIC)
    critic_num_gpus_per_node: int | None = as_the_actor(
        "GPUs per node of the critic", PER_NODE, CRITIC
    )
    ref_num_nodes: int | None = as_the_actor("Nodes of the reference", NODES, OWN_REFERENCE)
    ref_num_gpus_per_node: int | None = as_the_actor(
        "GPUs per node of the reference", PER_NODE, OWN_REFERENCE
    )
    reward_num_nodes: int | None = as_the_actor("Nodes of the reward", NODES, REWARD_MODEL)
    reward_num_gpus_per_node: int | None = as_the_actor(
        "GPUs per node of the reward", PER_NODE, REWARD_MODEL
    )
    teacher_num_nodes: int | None = as_the_actor("Nodes of the teacher", NODES, TEACHER_MODEL)
    teacher_num_gpus_per_node: int | None = as_the_actor(
        "GPUs per node of the teacher", PER_NODE, TEACHER_MODEL
    )
    placement: str | None = flag(
        None,
        'Explicit places of every role, e.g. "actor=0-3;ref=0-3;vllm=4-7"; roles with common'
        " numbers share these places. A place is a GPU, numbered across nodes, or on a CPU a"
        " worker slot.",
    )

    @property
    def environment(self) -> dict[str, str]:
        """--system_envs as name -> value."""
        return dict(pair.split("=", 1) for pair in self.system_envs)

    @property
    def explicit_places(self) -> dict[str, tuple[int, ...]]:
        """--placement as role -> its places in rank order; empty without it. Raises UserError."""
        roles = {name: role for role, name in FLAG_NAMES.items()}
        places: dict[str, tuple[int, ...]] = {}
        for entry in filter(None, (part.strip() for part in (self.placement or "").split(";"))):
            name, _, text = (word.strip() for word in entry.partition("="))
            if name not in roles:
                raise _unreadable(f"{name!r} is not one of {', '.join(roles)}")
            if roles[name] in places:
                raise _unreadable(f"{name} is named twice")
            places[roles[name]] = _numbers(name, text)
        return places

    def shape(self, role: str) -> tuple[int, int | None]:
        """Return the nodes of a model role and its GPUs per node, by default the actor's."""
        name = FLAG_NAMES[role]
        nodes = getattr(self, f"{name}_num_nodes") or self.actor_num_nodes
        per_node = getattr(self, f"{name}_num_gpus_per_node") or self.actor_num_gpus_per_node
        return nodes, per_node

    def ranks_of(self, role: str, device: str) -> int | None:
        """Return the ranks of a model role; None if only the cluster knows them: every GPU of a
        node, unless on a CPU."""
        if self.placement is not None:
            places = self.explicit_places
            return len(places[role]) if role in places else None
        nodes, per_node = self.shape(role)
        if per_node is None and device != "cpu":
            return None
        return nodes * (per_node or 1)


@group("Placement")
class RankFlags(ClusterFlags):
    """Where the ranks of one model run: in this process alone, under a launcher, or under Ray."""

    num_nodes: int = flag(1, "Ray nodes over which the ranks are spread.", bounds=NODES)
    num_gpus_per_node: int | None = flag(
        None,
        "Ranks per node as Ray workers, one per GPU or, on a CPU, per worker slot. None: no Ray;"
        " one rank in this process, or the ranks that torchrun started.",
        bounds=PER_NODE,
    )
    local_rank: int = flag(
        -1,
        "Rank on this node, for launchers that pass it on the command line. -1: $LOCAL_RANK.",
        bounds=">= -1",
        only_if=LAUNCHER,
    )

    @property
    def under_ray(self) -> bool:
        """Whether the ranks are Ray workers."""
        flags = (self.num_gpus_per_node, self.ray_address)
        return self.num_nodes > 1 or any(flag is not None for flag in flags)


@group("Hybrid engine")
class HybridFlags:
    colocate_all_models: bool = flag(
        False,
        "All models and the engines share the same GPUs; with --async_train only the models do.",
    )
    colocate_actor_ref: bool = flag(False, "Actor and reference share GPUs.", only_if=OWN_REFERENCE)
    colocate_critic_reward: bool = flag(
        False, "Critic and reward model share GPUs.", only_if=CRITIC_AND_REWARD
    )
    colocate_actor_teacher: bool = flag(
        False, "Actor and teacher share GPUs.", only_if=TEACHER_MODEL
    )
    vllm_enable_sleep: bool = flag(
        False,
        "Engines free their weights and cache while models train; they wake with weights first,"
        " then sync, then the cache. On a CPU they free only the cache.",
    )
    vllm_sleep_level: Literal[1, 2] = flag(
        1,
        "1: a sleeping engine keeps a copy of its weights in host memory; 2: it drops them and"
        " gets them from the next sync.",
        only_if=(given("vllm_enable_sleep"), VLLM),
    )
    deepspeed_enable_sleep: bool = flag(
        False,
        "Move training state off the GPU while other roles use it; --deepspeed_sleep_states says"
        " which parts.",
    )
    deepspeed_sleep_states: tuple[ModelPart, ...] = flag(
        ("optim", "grad"),
        "What --deepspeed_enable_sleep moves to host memory, or on a CPU to files under $TMPDIR."
        " optim: optimizer states and master weights; grad: gradient buffers, which are dropped;"
        " param: working weights.",
        only_if=given("deepspeed_enable_sleep"),
    )
    ref_reward_offload: bool = flag(
        False,
        "Keep reference, reward and teacher weights in host memory; each pass loads them layer by"
        " layer with --zero_stage 3, else whole.",
        only_if=FROZEN_MODEL,
    )

    @property
    def sleep_states(self) -> tuple[ModelPart, ...]:
        """The states of a trained model that leave its device while others use it."""
        return self.deepspeed_sleep_states if self.deepspeed_enable_sleep else ()

    def leaders(self, roles: Iterable[str], engines_apart: bool) -> dict[str, str]:
        """Return role -> the role whose places it shares; roles with places of their own are
        absent. ``engines_apart`` means that --colocate_all_models covers only the models."""
        followers: dict[str, str] = {}
        if self.colocate_actor_ref:
            followers["reference"] = "actor"
        if self.colocate_actor_teacher:
            followers["teacher"] = "actor"
        if self.colocate_critic_reward:
            followers["reward"] = "critic"
        if self.colocate_all_models:
            followers = dict.fromkeys(("critic", "reference", "reward", "teacher"), "actor")
            followers |= {} if engines_apart else {ENGINES: "actor"}
        present = {*roles, ENGINES}
        return {role: leader for role, leader in followers.items() if {role, leader} <= present}


@group("Device")
class DeviceFlags:
    device: Literal["auto", "cuda", "cpu"] = flag(
        "auto",
        "Where models run. auto: cuda if there is a GPU. cpu: gloo, and worker slots instead of"
        " GPUs.",
    )


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Parse "0-2,5" into (0, 1, 2, 5)."""
    numbers: list[int] = []
    for item in text.split(","):
        ends = item.strip().split("-")
        if len(ends) > 2 or not all(map(str.isdecimal, ends)) or int(ends[0]) > int(ends[-1]):
            raise _unreadable(
                f"{item.strip()!r} of {name} is neither a number nor a range like 0-3"
            )
        first, last = int(ends[0]), int(ends[-1])
        if last > MOST_PLACES:
            raise _unreadable(f"{item.strip()} of {name} goes beyond {MOST_PLACES} places")
        numbers += range(first, last + 1)
    if len(set(numbers)) < len(numbers):
        raise _unreadable(f"{name}={text} names a place twice")
    return tuple(sorted(numbers))


def _unreadable(why: str) -> UserError:
    return UserError(f"--placement: {why}", '--placement "actor=0-3;vllm=4-7"')
