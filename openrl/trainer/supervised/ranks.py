"""The ranks of a command with one model: this process alone, the processes of a launcher, or Ray
workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from openrl.cluster.group import LocalGroup, RankGroup
from openrl.cluster.launcher_group import LauncherGroup
from openrl.cluster.model_worker import ModelWorker
from openrl.config.commands import SupervisedConfig
from openrl.tracking.progress import Stage
from openrl.trainer.watching.supervision import logging_directory
from openrl.training.build import ModelSpec
from openrl.training.distributed import Launch

ROLE = "model"


@asynccontextmanager
async def start_ranks(
    config: SupervisedConfig, launch: Launch | None, spec: ModelSpec, stage: Stage
) -> AsyncIterator[RankGroup]:
    """Yield a group whose workers have not loaded the model yet. Whatever was started for it ends
    with the with block."""
    if config.ranks.under_ray:
        async with _ray_group(config, spec, stage) as group:
            yield group
    elif launch is not None:
        timeout, each = spec.deepspeed.dist_timeout, spec.parallel.ranks_per_shard
        group = LauncherGroup(
            ROLE, launch, spec.device, timeout, ModelWorker, spec, ranks_per_shard=each
        )
        try:
            yield group
        finally:
            await group.close()
    else:
        yield LocalGroup.create(ROLE, 1, ModelWorker, spec)


@asynccontextmanager
async def _ray_group(
    config: SupervisedConfig, spec: ModelSpec, stage: Stage
) -> AsyncIterator[RankGroup]:
    from openrl.cluster.hosts import GroupSettings  # Ray is heavy, and only some runs need it
    from openrl.cluster.planner import RoleRequest
    from openrl.cluster.ray_cluster import open_cluster
    from openrl.cluster.ray_group import RayGroup

    flags = config.ranks
    with stage("start"):
        cluster, plan = open_cluster(
            flags, [RoleRequest(ROLE, flags.num_nodes, flags.num_gpus_per_node)], spec.device
        )
    try:
        with stage("start"):
            reservation = await cluster.reserve(plan, flags.placement_timeout)
            settings = GroupSettings(
                flags.rpc_timeout,
                spec.parallel.ranks_per_shard,
                config.debug.plugin,
                log_dir=str(logging_directory(config)),
                stall_timeout=config.faults.stall_timeout,
            )
            group = await RayGroup.create(cluster, reservation, ROLE, settings, ModelWorker, spec)
        try:
            yield group
        finally:
            await group.close()
    finally:
        cluster.close()
