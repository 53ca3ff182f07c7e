"""The worker groups of a run: which models it has, what workers are built from, their start."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from openrl.agents.setup import AgentSetup
from openrl.cluster.fork_server import Preload
from openrl.cluster.group import LocalGroup, WorkerGroup
from openrl.cluster.hosts import GroupSettings
from openrl.cluster.placement import PlacementPlan
from openrl.cluster.planner import RoleRequest, role_requests
from openrl.cluster.ray_cluster import RayCluster
from openrl.cluster.ray_group import RayGroup, reserved_cluster
from openrl.cluster.reservation import Reservation
from openrl.config import derived
from openrl.config.commands import PPOConfig, SupervisedConfig
from openrl.config.derived import ranks_share_a_step, shards_divide
from openrl.config.groups.model import ModelChangeFlags
from openrl.config.groups.placement import ENGINES
from openrl.config.groups.reward import bearer_token
from openrl.config.lengths import longest_judged, longest_sequence
from openrl.config.teacher_plan import teacher_plan
from openrl.errors import raise_together
from openrl.models.device import Device
from openrl.models.process_memory import freeze_gc_heap
from openrl.rewards.build import RewardSetup
from openrl.rollout_engines.engine import EngineSpec
from openrl.rollout_engines.vllm_process import import_engine, preload_engine
from openrl.tracking.progress import Stage
from openrl.training_engine.build import ModelSpec
from openrl.training_engine.optimizers import OptimSpec
from openrl.waiting import all_or_first_error
from openrl.workers.model_worker import ModelWorker, import_training
from openrl.workers.profiling import MemoryLog
from openrl.workers.residency import Residency, ResidencyTable, RolePart
from openrl.workers.rollout_worker import RolloutWorker


@dataclass(frozen=True)
class Roles:
    """The worker groups of a run. A group is None if the run has no such model."""

    policy: WorkerGroup
    engines: WorkerGroup
    critic: WorkerGroup | None = None
    reference: WorkerGroup | None = None  # may be the policy's own, see ``adapted``
    reward: WorkerGroup | None = None
    teacher: WorkerGroup | None = None
    adapted: bool = False
    """The policy trains adapters on a frozen base; its start serves as the reference model."""
    residency: Residency = field(default_factory=Residency)
    """Keeps track of which parts of the groups are awake."""
    replaceable: bool = False
    """An engine that dies can be restarted while the others continue."""

    @property
    def models(self) -> list[WorkerGroup]:
        """All groups but the engines."""
        groups = (self.policy, self.critic, self.reference, self.reward, self.teacher)
        return [group for group in groups if group is not None]


TRAINED = ("actor", "critic")  # the other models are only evaluated


def model_spec(
    config: PPOConfig | SupervisedConfig, path: str, device: Device, **own: Any
) -> ModelSpec:
    """Return what a rank of a model is built from. ``own`` sets it apart from the run's others."""
    return ModelSpec(
        path=path,
        model=derived.loaded(config),
        deepspeed=config.deepspeed,
        device=device,
        seed=config.debug.seed,
        deterministic=config.debug.full_determinism,
        parallel=config.parallel,
        packing=derived.packs(config),
        shares=config.packing.shares_prefixes,
        vision=config.vision,
        changes=config.changes if path == config.model.pretrain else ModelChangeFlags(),
        **own,
    )


def model_paths(config: PPOConfig) -> dict[str, list[str]]:
    """Return the paths of each role's models: its own, then further frozen models that the same
    ranks evaluate in turn."""
    others, policy, roles = config.others, config.model.pretrain, config.model_roles
    paths = {
        "actor": [policy],
        "critic": [others.critic_pretrain or policy],
        "reference": [others.ref_pretrain or policy],
        "reward": list(derived.rewards(config).models) if "reward" in roles else [],
        "teacher": teacher_plan(config.teacher).of("model"),
    }
    return {role: paths[role] for role in roles}


def model_specs(
    config: PPOConfig, device: Device, optimizer_steps: int
) -> dict[str, list[ModelSpec]]:
    """Return the models of each role: its own, then further frozen models that the same ranks
    evaluate in turn."""
    frozen = config.algorithm.frozen_actor_steps * config.batch.optimizer_steps_per_rollout
    rate, steps = config.actor_optim.learning_rate, optimizer_steps - frozen
    average = config.checkpoint.ema_beta if config.checkpoint.enable_ema else None
    plan = teacher_plan(config.teacher)
    earlier = plan.earlier(config.teacher)
    critic_rate = config.critic_optim.learning_rate
    evaluated = {"optim": None, "streamed": derived.ref_reward_streams(config)}
    own: dict[str, dict[str, Any]] = {
        "actor": {
            "kind": "logprobs",
            "optim": OptimSpec(rate, config.optim, steps, average, earlier),
            "lora": config.lora,
            "replays": config.routing.routing_replay,
            "rollout_weights": getattr(config.options["policy_loss_type"], "rollout_weights", None),
            "others": {
                "reference": config.others.ref_pretrain or config.model.pretrain,
                "teacher": next(iter(plan.of("model")), config.model.pretrain),
            },
        },
        "critic": {
            "kind": "values",
            "optim": OptimSpec(critic_rate, config.optim, optimizer_steps),
            "lora": config.lora.of_critic,
        },
        "reference": {"kind": "logprobs", **evaluated},
        "teacher": {"kind": "logprobs", "vocabulary_of": config.model.pretrain, **evaluated},
        "reward": {"kind": "rewards", "normalise": config.others.normalize_reward, **evaluated},
    }
    common = {
        "temperature": config.sampling.temperature,
        "value_head": config.others.value_head_prefix,
        "top_k": derived.compared_top_k(config),
    }
    return {
        role: [model_spec(config, path, device, **common, **own[role]) for path in paths]
        for role, paths in model_paths(config).items()
    }


def run_engine_spec(
    config: PPOConfig, device: Device, engines: int = 1, shared: bool = False
) -> EngineSpec:
    """Return the spec of each of the run's ``engines``; ``shared``: models share their bundles."""
    return EngineSpec(
        config.model,
        config.engine,
        config.vision,
        device,
        longest_sequence(config),
        config.debug.seed,
        config.debug.full_determinism,
        shared,
        engines,
        expert_parallel=config.engine.vllm_enable_expert_parallel,
        judged=longest_judged(config),
        load_format=config.engine.vllm_load_format,
        adapter_rank=config.lora.rank if config.lora.lora_sync == "adapter" else 0,
        sleep_level=config.hybrid.vllm_sleep_level if config.hybrid.vllm_enable_sleep else 0,
        routes=config.routing.routing_replay,
        keep_cache_on_pause=config.asynchrony.partial_rollout_cache == "keep",
        config_overrides=config.changes.model_config_overrides,
    )


def worker_arguments(
    config: PPOConfig, device: Device, optimizer_steps: int, plan: PlacementPlan | None = None
) -> dict[str, tuple[Any, ...]]:
    """Return the worker class of each group and what its constructor takes after the context."""
    table: dict[str, tuple[Any, ...]] = {}
    for role, specs in model_specs(config, device, optimizer_steps).items():
        table[role] = (ModelWorker, *specs)
    placed = plan is not None and ENGINES in plan.bundles_by_role
    engines = (plan.size(ENGINES), plan.shared(ENGINES)) if plan and placed else ()
    engine = run_engine_spec(config, device, *engines)
    rewards = RewardSetup(
        config.reward,
        derived.rewards(config),
        bearer_token(),
        optional=derived.learns_without_rewards(config),
    )
    limit, backend = config.collecting.vllm_max_inflight_per_engine, config.engine.rollout_backend
    of_engines = (backend, engine, agent_setup(config), rewards, limit)
    return table | {ENGINES: (RolloutWorker, *of_engines)}


def sleep_parts(config: PPOConfig) -> list[RolePart]:
    """Return the parts that the flags let sleep: engines as a whole, trained models as
    --deepspeed_sleep_states says, and other models with --ref_reward_offload."""
    parts = [
        RolePart(ENGINES, part) for part in ("weights", "cache") if config.hybrid.vllm_enable_sleep
    ]
    for role in config.model_roles:
        if role in TRAINED:
            parts += [RolePart(role, part) for part in config.hybrid.sleep_states]
        elif derived.ref_reward_sleeps(config):
            parts.append(RolePart(role, "param"))
    return parts


def assign_roles(
    config: PPOConfig,
    groups: Mapping[str, WorkerGroup],
    residency: Residency | None = None,
    replaceable: bool = False,
) -> Roles:
    """Assign the groups to their parts in the run. Parts that the run does not need stay None."""
    adapted, wanted = config.policy_is_reference, config.model_roles
    return Roles(
        policy=groups["actor"],
        engines=groups.get(ENGINES) or LocalGroup(ENGINES, []),  # none if rollouts are replayed
        critic=groups["critic"] if "critic" in wanted else None,
        reference=(
            groups["actor" if adapted else "reference"] if config.kl.needs_reference else None
        ),
        reward=groups["reward"] if "reward" in wanted else None,
        teacher=groups["teacher"] if "teacher" in wanted else None,
        adapted=adapted,
        residency=residency or Residency(),
        replaceable=replaceable,
    )


def can_replace(plan: PlacementPlan, table: ResidencyTable) -> bool:
    """Return whether an engine can be restarted while the rest runs. It must find room, so it
    cannot share GPUs with models, and nothing may sleep. And it must get its weights from host
    memory, so it cannot span nodes."""
    if ENGINES not in plan.bundles_by_role:
        return False
    if plan.device == "cuda" and plan.shared(ENGINES):
        return False
    ranks = range(plan.size(ENGINES))
    return not table.rows and not any(plan.spans_nodes(ENGINES, rank) for rank in ranks)


def role_bundles(config: PPOConfig) -> list[RoleRequest]:
    """Return the bundles that every role wants. Engines want none if rollouts are replayed."""
    roles, leaders = config.model_roles, derived.leaders(config)
    requests = role_requests(config.placement, config.engine, roles, leaders)
    return [r for r in requests if r.name != ENGINES or not config.collecting.replays]


@asynccontextmanager
async def start_roles(
    config: PPOConfig, device: Device, optimizer_steps: int, stage: Stage
) -> AsyncIterator[Roles]:
    """Join or start a cluster and start all groups on it, side by side, see ``reserved_cluster``.

    Engines that share GPUs with models start first, since vLLM measures free memory while it
    starts. If anything can sleep, roles start one after the other, and each goes to sleep before
    the next one needs its memory."""

    def accept(plan: PlacementPlan) -> None:
        check_ranks(config, {role: len(plan.bundles_by_role[role]) for role in config.model_roles})
        if not config.logging.quiet:
            print(plan.render(), flush=True)

    flags, requests = config.placement, role_bundles(config)
    async with reserved_cluster(flags, requests, device, stage, accept) as reserved:
        cluster, reservation, started = reserved
        plan, groups = reservation.plan, dict[str, WorkerGroup]()
        with stage("start"):
            made_of = worker_arguments(config, device, optimizer_steps, plan)
            memory = MemoryLog() if config.rl_logging.log_memory else None
            residency = Residency(ResidencyTable.of(plan, sleep_parts(config)), memory)
            for wave in start_waves(plan, residency.table):
                starting = (
                    _start(config, cluster, reservation, role, *made_of[role]) for role in wave
                )
                in_wave = await all_or_first_error(starting)
                started += in_wave
                groups |= dict(zip(wave, in_wave, strict=True))
                for role in wave:
                    await residency.started(role, groups[role])
        gc.unfreeze()  # there is garbage of the preparation, and of workers before a restart
        freeze_gc_heap()
        yield assign_roles(config, groups, residency, can_replace(plan, residency.table))


def start_waves(plan: PlacementPlan, table: ResidencyTable) -> list[list[str]]:
    """Return the roles in waves, which start one after the other; those of one, side by side."""
    engines = [role for role in plan.bundles_by_role if role == ENGINES]
    models = [role for role in plan.bundles_by_role if role != ENGINES]
    if table.rows:
        return [[role] for role in (*engines, *models)]
    return [engines, models] if engines and plan.shared(ENGINES) else [[*engines, *models]]


async def _start(
    config: PPOConfig,
    cluster: RayCluster,
    reservation: Reservation,
    role: str,
    worker_class: type,
    *args: Any,
) -> RayGroup:
    preload = None
    if role != ENGINES:
        preload = Preload(import_training)
    elif args[0] == "vllm" and args[1].device == "cpu":
        preload = Preload(partial(import_engine, args[1]), partial(preload_engine, args[1]))
    settings = GroupSettings(
        config.placement.rpc_timeout,
        1 if role == ENGINES else config.parallel.ranks_per_shard,
        config.debug.plugin,
        config.placement.environment,
        str(derived.logging_directory(config)),
        config.faults.stall_timeout,
        preload,
    )
    group = await RayGroup.create(cluster, reservation, role, settings, worker_class, *args)
    await group.call("start")
    return group


def agent_setup(config: PPOConfig) -> AgentSetup:
    return AgentSetup(
        config.agents,
        config.environments,
        config.templates,
        config.vision,
        config.debug.plugin,
        config.teacher,
    )


def check_ranks(config: PPOConfig, ranks: Mapping[str, int]) -> None:
    """Raise UserError if ranks do not divide as the parallelism flags require, or a step among the
    actor's. Their numbers may only be known once the cluster is."""
    problems = [*ranks_share_a_step(config, ranks["actor"])]
    for role, world in ranks.items():
        if role != "actor":
            problems += shards_divide(config.parallel, world, role)
    raise_together(problems)
