"""Flags of places: which role runs on which GPUs, and what sleeps there."""

from __future__ import annotations

from typing import Literal

from openrl.config.conditions import (
    CRITIC,
    CRITIC_AND_REWARD,
    FROZEN_MODEL,
    LAUNCHER,
    RAY,
    REFERENCE,
    SECOND_REFERENCE,
    VLLM,
)
from openrl.flags.schema import flag, given, group

SleepState = Literal["param", "optim", "grad"]


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
        bounds=">= 0",
        only_if=RAY,
    )
    placement_timeout: int = flag(
        600,
        "Seconds to wait for the cluster to grant the placement before the run stops and says"
        " what is missing. 0: no limit.",
        bounds=">= 0",
        only_if=RAY,
    )


@group("Placement")
class PlacementFlags(ClusterFlags):
    system_envs: tuple[str, ...] = flag(
        (),
        "Environment variables for every process of the run, e.g. NCCL_DEBUG=WARN; they override"
        " openrl's own.",
    )
    actor_num_nodes: int = flag(1, "Nodes of the actor group.", bounds="> 0")
    actor_num_gpus_per_node: int | None = flag(
        None,
        "GPUs per node of the actor group; on a CPU, worker slots. None: every GPU of the node; 1"
        " on a CPU.",
        bounds="> 0",
    )
    critic_num_nodes: int | None = flag(
        None, "Nodes of the critic group. None: as the actor.", bounds="> 0", only_if=CRITIC
    )
    critic_num_gpus_per_node: int | None = flag(
        None, "GPUs per node of the critic group. None: as the actor.", bounds="> 0", only_if=CRITIC
    )
    ref_num_nodes: int | None = flag(
        None,
        "Nodes of the reference group. None: as the actor.",
        bounds="> 0",
        only_if=(REFERENCE, SECOND_REFERENCE),
    )
    ref_num_gpus_per_node: int | None = flag(
        None,
        "GPUs per node of the reference group. None: as the actor.",
        bounds="> 0",
        only_if=(REFERENCE, SECOND_REFERENCE),
    )
    reward_num_nodes: int | None = flag(
        None,
        "Nodes of the reward group. None: as the actor.",
        bounds="> 0",
        only_if=given("reward_pretrain"),
    )
    reward_num_gpus_per_node: int | None = flag(
        None,
        "GPUs per node of the reward group. None: as the actor.",
        bounds="> 0",
        only_if=given("reward_pretrain"),
    )
    placement: str | None = flag(
        None,
        'Explicit places of every role, e.g. "actor=0-3;ref=0-3;vllm=4-7"; roles with common'
        " numbers share these places. A place is a GPU, numbered across nodes, or on a CPU a"
        " worker slot.",
    )


@group("Placement")
class RankFlags(ClusterFlags):
    """Where the ranks of a command with one model run: in this process alone, under a launcher, or
    under Ray."""

    num_nodes: int = flag(1, "Ray nodes over which the ranks are spread.", bounds="> 0")
    num_gpus_per_node: int | None = flag(
        None,
        "Ranks per node as Ray workers, one per GPU or, on a CPU, per worker slot. None: no Ray;"
        " one rank in this process, or the ranks that torchrun started.",
        bounds="> 0",
    )
    local_rank: int = flag(
        -1,
        "Rank on this node, for launchers that pass it on the command line. -1: $LOCAL_RANK.",
        bounds=">= -1",
        only_if=LAUNCHER,
    )


@group("Hybrid engine")
class HybridFlags:
    colocate_all_models: bool = flag(
        False,
        "All models and the engines share the same GPUs; with --async_train only the models do.",
    )
    colocate_actor_ref: bool = flag(
        False, "Actor and reference share GPUs.", only_if=(REFERENCE, SECOND_REFERENCE)
    )
    colocate_critic_reward: bool = flag(
        False, "Critic and reward model share GPUs.", only_if=CRITIC_AND_REWARD
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
    deepspeed_sleep_states: tuple[SleepState, ...] = flag(
        ("optim", "grad"),
        "What --deepspeed_enable_sleep moves to host memory, or on a CPU to files under $TMPDIR."
        " optim: optimizer states and master weights; grad: gradient buffers, which are dropped;"
        " param: working weights.",
        only_if=given("deepspeed_enable_sleep"),
    )
    ref_reward_offload: bool = flag(
        False,
        "Keep reference and reward weights in host memory; each pass loads them layer by layer"
        " with --zero_stage 3, else whole.",
        only_if=FROZEN_MODEL,
    )

    @property
    def sleep_states(self) -> tuple[SleepState, ...]:
        """The states of a trained model that leave its device while others use it."""
        return self.deepspeed_sleep_states if self.deepspeed_enable_sleep else ()


@group("Device")
class DeviceFlags:
    device: Literal["auto", "cuda", "cpu"] = flag(
        "auto",
        "Where models run. auto: cuda if there is a GPU. cpu: gloo, and worker slots instead of"
        " GPUs.",
    )
