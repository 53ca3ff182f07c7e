"""The text of --dry_run: where ranks go, how rollouts are divided, what it takes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import fields, replace

import torch

from openrl.algorithms.batching import PER_TOKEN, TokenCap
from openrl.cluster.placement import Node, PlacementPlan, text_table
from openrl.cluster.planner import plan_placement
from openrl.cluster.ray_cluster import this_machine
from openrl.config import derived
from openrl.config.commands import PPOConfig, SFTConfig, SupervisedConfig
from openrl.config.groups.batch import RolloutBatchFlags
from openrl.config.groups.placement import ENGINES, PlacementFlags
from openrl.trainer.learning.rows import rollout_batching, step_size, supervised_batching
from openrl.trainer.planning.memory_estimate import (
    Memory,
    gpu_memory,
    memory_by_role,
    model_memory,
    model_shape,
)
from openrl.trainer.planning.prepare import Inputs
from openrl.trainer.planning.sleep_estimate import (
    StageMemory,
    dropped_parts,
    simulate_stages,
    stages,
)
from openrl.trainer.planning.start_lines import start_lines
from openrl.trainer.planning.time_estimate import estimate_lines
from openrl.trainer.saving.disk import format_bytes
from openrl.training_engine.build import ModelSpec
from openrl.weights.transport import WORDS, TransportName, choose_transport, fallback_warning
from openrl.workers.residency import ResidencyTable, RolePart
from openrl.workers.roles import check_ranks, model_specs, role_bundles, sleep_parts

GPUS_OF_A_NODE = 8  # assumed where there is no GPU to count


def describe(config: PPOConfig, inputs: Inputs) -> str:
    """Describe a run: its placement, batch arithmetic and estimated memory. Raises UserError if a
    model's config does not load, or if batches do not divide among the ranks."""
    plan = plan_placement(role_bundles(config), inputs.device, [planned_node(inputs.device)])
    steps = config.batch.total_optimizer_steps(len(inputs.prompts))
    models = model_specs(config, inputs.device, steps)
    check_ranks(config, {role: len(plan.bundles_by_role[role]) for role in models})
    memory = memory_by_role(config, models, plan, inputs.device)
    batch = batch_rows(config, len(inputs.prompts), plan)
    parts = [
        *start_lines(config, inputs.device),
        *inputs.reports,
        plan.render(),
        *placement_remarks(config.placement, plan),
        *transport_lines(config, plan),
        text_table("Batches", ("", "count", ""), batch),
        *estimate_lines(config, inputs),
        memory_table(
            memory, {role: len(slots) for role, slots in plan.bundles_by_role.items()}, plan.device
        ),
        *sleep_table(config, plan, memory),
        *room_remarks(
            memory_by_stage(config, plan, memory),
            gpu_memory(config.debug) if plan.device == "cuda" else None,
        ),
        ("Not counted: CUDA graphs, libraries, the cache of --rollout_backend hf."),
    ]
    return "\n\n".join(parts)


def placement_remarks(flags: PlacementFlags, plan: PlacementPlan) -> list[str]:
    """Return what keeps the plan from running here, or what users should know about it."""
    if address := flags.address:
        return [
            f"The cluster at {address} was not asked; this is the plan for nodes like this machine."
        ]
    if plan.device == "cpu":
        return plan.notes(os.cpu_count() or 1)
    if not torch.cuda.is_available():
        return [f"There is no GPU here; this is the plan for nodes of {GPUS_OF_A_NODE} GPUs."]
    return [f"Does not fit this machine: {problem}." for problem in plan.problems([this_machine()])]


def planned_node(device: str) -> Node:
    """Return this machine as a node, with the GPUs of a typical one if it lacks those needed."""
    machine = this_machine()
    if device == "cpu" or machine.gpus:
        return machine
    return replace(machine, gpus=GPUS_OF_A_NODE, free_gpus=GPUS_OF_A_NODE)


def transport_lines(config: PPOConfig, plan: PlacementPlan) -> list[str]:
    if ENGINES not in plan.bundles_by_role:
        return [f"No engine is started: rollouts come from {config.collecting.rollout_replay_dir}."]
    way = transport_of(config, plan)
    warning = fallback_warning(config.engine.vllm_sync_backend, way)
    return [f"Weights travel through {WORDS[way]}.", *([warning] if warning else [])]


def transport_of(config: PPOConfig, plan: PlacementPlan) -> TransportName:
    """Predict the transport to the engines, which a run chooses from where its processes are."""
    reads_host_memory = config.lora.lora_sync == "adapter" or config.engine.rollout_backend == "hf"
    if plan.device == "cpu" or reads_host_memory or config.engine.vllm_data_parallel_size > 1:
        return "host"
    actor, engines = plan.bundles_by_role["actor"], plan.bundles_by_role[ENGINES]
    return choose_transport(config.engine.vllm_sync_backend, actor, engines)


# -- batches ---------------------------------------------------------------------------------------


def batch_rows(
    config: PPOConfig, n_prompts: int, plan: PlacementPlan
) -> list[tuple[str, str, str]]:
    """Return rows of (what, count, explanation), from a step's prompts to the run's steps."""
    batch = config.batch
    samples, trained = batch.samples_per_step, derived.most_trained(config)
    steps = batch.total_steps(n_prompts)
    ranks, each = len(plan.bundles_by_role["actor"]), config.parallel.ranks_per_shard
    shared = [
        ("actor ranks", f"{ranks}", f"{ranks // each} data parallel x {each} on the same rows")
    ]
    staleness, policy = config.asynchrony.staleness_bound, config.asynchrony.staleness_policy
    age = f"tokens at most {staleness} weight syncs old ({policy})"
    later = config.asynchrony.steps_ahead * batch.rollout_batch_size
    most = later + max(derived.prompts_running(config), batch.rollout_batch_size)
    ahead = ("prompts under way or waiting", f"at most {most:,}", age)
    groups = config.replay.replay_groups
    again = ("replayed samples per step", f"at most {trained - samples:,}", f"of {groups:,} groups")
    return [
        *(shared if each > 1 else []),
        (
            "prompts per step",
            f"{batch.rollout_batch_size:,}",
            f"of {n_prompts:,}, {batch.num_episodes} times",
        ),
        *([ahead] if config.asynchrony.carries_over else []),
        ("samples per step", f"{samples:,}", f"{batch.n_samples_per_prompt} of each prompt"),
        *([again] if groups else []),
        (
            "optimizer steps per step",
            f"{batch.optimizer_steps_per_rollout:,}",
            f"of {step_size(batch, trained)} samples, {batch.max_epochs} times over",
        ),
        *micro_batch_rows(config, ranks // each),
        ("steps", f"{steps:,}", "--max_steps" if batch.max_steps > 0 else "all episodes"),
        ("optimizer steps in all", f"{batch.total_optimizer_steps(n_prompts):,}", ""),
        ("samples in all", f"{steps * samples:,}", ""),
    ]


def micro_batch_rows(config: PPOConfig, ranks: int) -> list[tuple[str, str, str]]:
    """Return the rows on micro-batches, of an optimizer step and of a forward-only pass, for
    ``ranks`` data-parallel ranks. With a token cap their number depends on the rollout."""
    spec, each = rollout_batching(config, PER_TOKEN), config.parallel.ranks_per_shard
    on = f"{ranks} ranks" if each == 1 else f"{ranks} x {each} ranks"
    names = (
        "micro-batches per rank and optimizer step",
        "micro-batches per rank and forward-only pass",
    )
    rows, trained = [], derived.most_trained(config)
    for name, count, size in zip(
        names, micro_batches(config.batch, ranks, trained), (spec.train, spec.forward), strict=True
    ):
        if isinstance(size, TokenCap):
            rows.append((name, "by length", f"of at most {size.tokens:,} tokens on {on}"))
        else:
            rows.append((name, f"{count:,}", f"of {size} samples on {on}"))
    return rows


def micro_batches(batch: RolloutBatchFlags, ranks: int, samples: int) -> tuple[int, int]:
    """Return how many micro-batches each rank runs: (in one optimizer step, in one forward-only
    pass over the ``samples`` of a step)."""
    step = min(step_size(batch, samples), samples)
    return (
        math.ceil(math.ceil(step / ranks) / batch.micro_train_batch_size),
        math.ceil(math.ceil(samples / ranks) / batch.micro_rollout_batch_size),
    )


# -- memory ----------------------------------------------------------------------------------------


def supervised_memory(
    config: SupervisedConfig, spec: ModelSpec, ranks: int, teachers: Sequence[ModelSpec] = ()
) -> str:
    """Return the memory table for training one model, beside ``teachers`` on the same ranks. A
    reference model runs before it and needs less. Raises UserError if the model's config does not
    load."""
    size = supervised_batching(config, PER_TOKEN).train
    rows = 1 if isinstance(config, SFTConfig) else 2
    tokens = size.tokens if isinstance(size, TokenCap) else size * rows * config.data.max_len
    split = config.parallel.ds_tensor_parallel_size
    memory = {}
    for name, model in [("model", spec), *(("teacher", teacher) for teacher in teachers)]:
        shape = model_shape(model.path, config.model.trust_remote_code).of_rank(split)
        of_rank = tokens // config.parallel.sequence_size
        memory[name] = model_memory(model, shape, ranks // split, of_rank)
    table = memory_table(memory, dict.fromkeys(memory, ranks), spec.device)
    return f"{table}\nNot counted: libraries."


def memory_table(memory: dict[str, Memory], ranks: dict[str, int], device: str) -> str:
    """Return a table of the memory per rank, one row per role. On a machine without GPUs, a line
    compares the sum over all ranks with the machine's memory."""
    names = [f.name for f in fields(Memory)]
    rows = [
        (
            role,
            str(ranks[role]),
            *(_cell(getattr(m, name)) for name in names),
            _cell(m.total),
        )
        for role, m in memory.items()
    ]
    table = text_table("Memory per rank, estimated", ("role", "ranks", *names, "sum"), rows)
    if device == "cpu":
        total = sum((m.total + m.host) * ranks[role] for role, m in memory.items())
        here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        table += f"\nAll ranks: {format_bytes(total)}"
        table += f"; this machine has {format_bytes(here)}."
    return table


def sleep_table(config: PPOConfig, plan: PlacementPlan, memory: dict[str, Memory]) -> list[str]:
    """Return a table of who falls asleep and wakes before each stage, and how much memory a place
    then holds; empty if nothing sleeps."""
    if not ResidencyTable.of(plan, sleep_parts(config)).rows:
        return []
    walked = memory_by_stage(config, plan, memory)
    rows = [
        (w.stage, _names(w.slept), _names(w.woken), _cell(w.peak), _cell(w.host)) for w in walked
    ]
    place = "GPU" if plan.device == "cuda" else "place"
    header = (
        "stage",
        "goes to sleep",
        "wakes up",
        f"most on one {place}",
        f"of one {place} on the host",
    )
    return [text_table("A step, stage by stage", header, rows)]


def memory_by_stage(
    config: PPOConfig, plan: PlacementPlan, memory: dict[str, Memory]
) -> list[StageMemory]:
    sizes = {role: m.by_part() for role, m in memory.items()}
    table = ResidencyTable.of(plan, sleep_parts(config))
    return simulate_stages(table, stages(config), sizes, dropped_parts(config))


def room_remarks(walked: list[StageMemory], capacity: int | None) -> list[str]:
    """Return a remark if the fullest stage does not fit into ``capacity`` bytes (None: unknown)."""
    fullest = max(walked, key=lambda found: found.peak)
    if capacity is None or fullest.peak <= capacity:
        return []
    return [
        f"Does not fit: a GPU has {format_bytes(capacity)}, and {fullest.stage} takes"
        f" {format_bytes(fullest.peak)} of one before anything that is not counted. Let more sleep"
        " (--vllm_enable_sleep, --deepspeed_enable_sleep, --ref_reward_offload), divide more"
        " (--zero_stage 3), or lower --vllm_gpu_memory_utilization."
    ]


def _names(parts: list[RolePart]) -> str:
    return " ".join(map(str, parts)) or "-"


def _cell(count: int) -> str:
    return format_bytes(count) if count else "-"
