"""What follows from flags of several groups, each fact computed in one place; what follows from one
group is a property of the group. What only the cluster or the data knows is an argument."""

from __future__ import annotations

import math
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import Any, Literal

from openrl.config.commands import (
    AnsweringConfig,
    DPOConfig,
    PPOConfig,
    ServeConfig,
    SFTConfig,
    TrainingConfig,
)
from openrl.config.groups.deepspeed import ParallelFlags
from openrl.config.groups.lora import LoRAFlags
from openrl.config.groups.model import Dtype, ModelFlags
from openrl.config.groups.placement import FLAG_NAMES
from openrl.config.groups.reward import split
from openrl.config.reward_plan import RewardPlan, reward_plan, reward_sources
from openrl.config.teacher_plan import routed_models
from openrl.flags.checks import Problems, in_use, problem

# -- directories ----------------------------------------------------------------------------------


def logging_directory(config: TrainingConfig) -> Path:
    """Return the directory in which every process of the run writes its log."""
    named = config.logging.logging_dir
    directory = Path(named) if named else Path(config.checkpoint.save_path) / "logs"
    return directory.expanduser().absolute()


# -- batches and steps -----------------------------------------------------------------------------


def prompts_running(config: PPOConfig) -> int:
    """Return how many prompts may be running or complete at a time for one training step."""
    size = config.collecting.vllm_generate_batch_size or config.environments.env_groups
    return size or math.ceil(config.asynchrony.oversample_ratio * config.batch.rollout_batch_size)


def prompts_to_try(config: PPOConfig, n_prompts: int) -> int:
    """Return how many prompts one training step may try: each of ``n_prompts`` once, but each
    environment at most --env_max_trajectories."""
    most = config.environments.env_max_trajectories
    return min(n_prompts, most * prompts_running(config)) if most > 0 else n_prompts


def off_policy_flags(config: PPOConfig) -> tuple[str, ...]:
    """Return the flags in use that start more rollouts than a step trains on, or earlier."""
    by_size = in_use(config, "vllm_generate_batch_size") or ("oversample_ratio",)
    surplus = prompts_running(config) > config.batch.rollout_batch_size
    return in_use(config, "async_train", "partial_rollout") + (by_size if surplus else ())


def packs(config: TrainingConfig) -> bool:
    """Return whether each micro-batch runs as one row without padding."""
    packed = config.packing.packing_samples or config.packing.shares_prefixes
    return packed or config.dynamic.use_dynamic_batch or config.parallel.ring_attn_size > 1


def trained_ranks(config: TrainingConfig) -> int | None:
    """Return the ranks of the trained model; None if only the cluster or a launcher knows."""
    if isinstance(config, PPOConfig):
        return config.placement.ranks_of("actor", config.device.device)
    ranks = config.ranks
    if ranks.under_ray and ranks.num_gpus_per_node:
        return ranks.num_nodes * ranks.num_gpus_per_node
    return None


def loaded(config: TrainingConfig) -> ModelFlags:
    """Return how models are loaded; shared prefixes need the attention varlen."""
    if config.packing.shares_prefixes:
        return replace(config.model, attn_implementation="varlen")
    return config.model


def reference_lora(config: DPOConfig) -> LoRAFlags:
    """Return the reference's LoRA flags: the adapter to start from, unless it is another model."""
    path = config.lora.lora_adapter_path if config.reference.ref_pretrain is None else None
    return replace(config.lora, lora_rank=0, lora_adapter_path=path)  # type: ignore[type-var]


def data_seed(config: Any) -> int:
    """Return the seed of any command's row order: --data_seed or else --seed."""
    return config.debug.seed if config.order.data_seed is None else config.order.data_seed


def agents_of(config: PPOConfig | AnsweringConfig) -> tuple[str, ...]:
    """Return the flags that say who plays; with none, the policy answers once."""
    return in_use(config, "agent_func_path", "agent_command", "env_tags", "tools")


# -- ranks and what they share ---------------------------------------------------------------------

SPLITS = ("ulysses_size", "ring_attn_size")
TENSOR = "ds_tensor_parallel_size"


def splitting_flags(flags: ParallelFlags) -> tuple[str, ...]:
    """Return the flags that put several ranks on the same rows."""
    return tuple(name for name in (*SPLITS, TENSOR) if getattr(flags, name) > 1)


def shards_divide(flags: ParallelFlags, world: int, role: str) -> Problems:
    """Yield the problems of ``world`` ranks of a role, at start if only the cluster knows them."""
    if world % flags.ranks_per_shard:
        ranks = (
            f"{FLAG_NAMES[role]}_num_gpus_per_node" if role in FLAG_NAMES else "num_gpus_per_node"
        )
        message = (
            f"{world} ranks of the {role} do not divide evenly into blocks of"
            f" {flags.ranks_per_shard} that share rows"
        )
        alone = " ".join(f"--{name} 1" for name in splitting_flags(flags))
        fix = f"a multiple of {flags.ranks_per_shard} ranks, or {alone}"
        yield problem((*splitting_flags(flags), ranks), message, fix)


def ranks_share_a_step(config: PPOConfig, world: int) -> Problems:
    """Yield the problems of ``world`` actor ranks, at start if only the cluster knows them."""
    batch, micro = config.batch.train_batch_size, config.batch.micro_train_batch_size
    ranks, called = sharing_ranks(config, world)
    flags: tuple[str, ...] = ("train_batch_size", "actor_num_nodes", "actor_num_gpus_per_node")
    if world % config.parallel.ranks_per_shard:
        yield from shards_divide(config.parallel, world, "actor")
    elif config.dynamic.use_dynamic_batch:
        if batch < ranks:
            message = (
                f"{batch} samples are too few: some of the {ranks} {called} would have no work"
            )
            yield problem(flags, message, fitting_sizes(config, world))
    elif batch % ranks:
        message = f"{batch} samples do not divide evenly among {ranks} {called}"
        yield problem(flags, message, fitting_sizes(config, world))
    elif batch % (micro * ranks):
        message = (
            f"{batch} samples are not a multiple of {micro} * {ranks} (micro_train_batch_size *"
            f" {called})"
        )
        flags = ("train_batch_size", "micro_train_batch_size")
        yield problem(flags, message, fitting_sizes(config, world))


def sharing_ranks(config: PPOConfig, world: int) -> tuple[int, str]:
    """Return how many of ``world`` actor ranks, or blocks of them, get rows of their own, and what
    they are called."""
    each = config.parallel.ranks_per_shard
    return max(1, world // each), "actor ranks" if each == 1 else f"blocks of {each} actor ranks"


def fitting_sizes(config: PPOConfig, world: int) -> str:
    """Return the batch flags, nearest to those given, with which a rollout divides into optimizer
    steps and each of these among the actor ranks; or else a number of ranks."""
    batch, samples = config.batch, config.batch.samples_per_step
    dynamic, (ranks, called) = config.dynamic.use_dynamic_batch, sharing_ranks(config, world)
    sizes = [d for d in divisors(samples) if (d >= ranks if dynamic else d % ranks == 0)]
    if not sizes:
        fewer = largest_divisor(samples, ranks)
        return f"a number of {called} that divides {samples}, such as {fewer}"
    size = min(sizes, key=lambda d: abs(d - batch.train_batch_size))
    micro = largest_divisor(size // ranks, batch.micro_train_batch_size)
    sizes_of = {"train_batch_size": size} | ({} if dynamic else {"micro_train_batch_size": micro})
    changed = {name: n for name, n in sizes_of.items() if n != getattr(batch, name)}
    return " ".join(f"--{name} {n}" for name, n in changed.items())


def longest_row(config: TrainingConfig) -> tuple[int, str, tuple[str, ...]]:
    """Return the most tokens that stay together, what they are, and the flags to name with it."""
    if isinstance(config, PPOConfig):
        both = config.sampling.lengths.both
        return both, f"a row of {both} tokens, --prompt_max_len + --generate_max_len", ()
    max_len = config.data.max_len
    if isinstance(config, SFTConfig) or (isinstance(config, DPOConfig) and config.preference.rated):
        return max_len, f"a row of --max_len {max_len}", ("max_len",)
    return 2 * max_len, f"a pair of rows of --max_len {max_len}", ("max_len",)


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number`` in ascending order, in the time of its square root."""
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``limit``."""
    return max(d for d in divisors(number) if d <= limit)


Scoring = PPOConfig | ServeConfig | AnsweringConfig


# -- models ----------------------------------------------------------------------------------------


def rewards(config: PPOConfig) -> RewardPlan:
    """Return the sources of rewards and their weights. Raises UserError."""
    watched = config.health.watch_funcs
    return reward_plan(config.reward, config.others.reward_pretrain, watched)


SOURCES = ("remote_rm_url", "reward_funcs", "reward_pretrain")
"""The flags that name sources of rewards."""


def most_trained(config: PPOConfig) -> int:
    """Return the most samples that a step trains on, with those that are replayed."""
    again = config.replay.replay_groups * config.batch.n_samples_per_prompt
    return config.batch.samples_per_step + again


def learns_without_rewards(config: PPOConfig) -> bool:
    """Return whether answers may have no reward, because a teacher is all that the run learns
    from."""
    return config.teacher.used and not are_scored(config)


def are_scored(config: PPOConfig) -> bool:
    """Return whether a reward source or an agent scores the answers."""
    return bool(asked_sources(config) or {*agents_of(config)} - {"tools"})


def reward_models(config: Scoring) -> str | None:
    return (config.others if isinstance(config, PPOConfig) else config.rm).reward_pretrain


def asked_sources(config: Scoring) -> tuple[str, ...]:
    """Return the flags in use that name reward sources."""
    return in_use(config, *SOURCES)


def source_kinds(config: PPOConfig) -> set[str]:
    """Return the kinds of the reward sources. Raises UserError."""
    sources = reward_sources(config.reward, config.others.reward_pretrain)
    return {source.kind for source in sources}


def compared_dtype(config: PPOConfig) -> Dtype:
    """Return the coarser of engine's and trainer's dtypes, in which log-probs can be compared."""
    coarse: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")
    used = (config.model.param_dtype, config.engine.vllm_dtype)
    return next((dtype for dtype in coarse if dtype in used), config.model.param_dtype)


# -- sleep -----------------------------------------------------------------------------------------


def ref_reward_streams(config: PPOConfig) -> bool:
    """Return whether --ref_reward_offload fetches weights layer by layer, with ZeRO 3."""
    return config.hybrid.ref_reward_offload and config.deepspeed.zero_stage == 3


def ref_reward_sleeps(config: PPOConfig) -> bool:
    """Return whether --ref_reward_offload moves whole models out and back in, without ZeRO 3."""
    return config.hybrid.ref_reward_offload and config.deepspeed.zero_stage < 3


def leaders(config: PPOConfig) -> dict[str, str]:
    """Return role -> the role whose places it shares, without --placement: that names the places
    of every role, so none follows another."""
    if config.placement.placement is not None:
        return {}
    return config.hybrid.leaders(config.model_roles, config.asynchrony.async_train)


def roles_on_shared_places(config: PPOConfig) -> set[str]:
    """Return the models and engines that share a place with another role. Raises UserError."""
    if config.placement.placement is not None:
        places = config.placement.explicit_places
        return {
            r
            for r, at in places.items()
            if any(r != other and {*at} & {*there} for other, there in places.items())
        }
    return {role for pair in leaders(config).items() for role in pair}


# -- losses ----------------------------------------------------------------------------------------


OldLogprobs = Literal["forward", "update", "engine"]


def old_logprobs(config: PPOConfig) -> OldLogprobs:
    """Return where old log-probs come from.

    - forward: a pass of the policy before its update, for several optimizer steps, KL in the
      reward, some corrections (``corrects_early``), ``outputs_before``, or a loss that needs it.
    - update: the update's own pass, with a single optimizer step.
    - engine: the log-probs that the engine sampled with.
    """
    skip = config.correction.skip_old_logprob
    if skip == "always":
        return "engine"
    needs = config.algorithm.policy_loss.needs
    early = config.kl.in_reward or corrects_early(config) or "old_logprobs" in needs
    early = early or bool(outputs_before(config))
    several = config.batch.optimizer_steps_per_rollout > 1
    return "forward" if skip == "never" or early or several else "update"


def outputs_before(config: PPOConfig) -> tuple[Literal["entropy", "squares"], ...]:
    """Return what the pass of the policy before its update computes beside log-probs: entropies, to
    choose tokens by, and what the estimator reads."""
    wanted: dict[Literal["entropy", "squares"], bool] = {
        "entropy": config.algorithm.top_entropy_quantile < 1,
        "squares": "squares" in config.algorithm.estimator.needs,
    }
    return tuple(name for name, used in wanted.items() if used)


def compared_top_k(config: PPOConfig) -> dict[Literal["reference", "teacher"], int]:
    """Return the models whose whole distributions enter a loss or the reward, with how many of
    their likeliest tokens do; 0: all."""
    top_ks: dict[Literal["reference", "teacher"], int | None] = {
        "reference": config.kl.full_top_k,
        "teacher": config.teacher.top_k,
    }
    return {other: top_k for other, top_k in top_ks.items() if top_k is not None}


def corrects_early(config: PPOConfig) -> bool:
    """Return whether the correction of rollouts needs old log-probs before the update: for tests
    that remove tokens from the counts, for a mean over the batch, for weights that depend on other
    rows, or because the update's own have dropout in them. Replayed rollouts may contain
    multi-segment trajectories, so they weigh as if agents were on."""
    flags = config.correction
    if flags.rollout_rs or not flags.enable_vllm_is_correction:
        return bool(flags.rollout_rs)
    recorded = config.collecting.rollout_dump_dir or config.collecting.rollout_replay_dir
    several_rows = bool(agents_of(config) or recorded)
    other_rows = flags.weighs_sequences and several_rows
    return flags.vllm_is_batch_normalize or other_rows or config.lora.lora_dropout > 0


def reads_all_old_logprobs(config: PPOConfig) -> bool:
    """Return whether old log-probs are also needed for rows without a gradient: for rewards, for
    tests that remove tokens from the counts, for means over the batch, or because the user asked
    for them."""
    flags = config.correction
    return (
        config.kl.in_reward
        or bool(flags.rollout_rs)
        or (flags.enable_vllm_is_correction and flags.vllm_is_batch_normalize)
        or "old_logprobs" in config.algorithm.policy_loss.needs
        or bool(outputs_before(config))
        or flags.skip_old_logprob == "never"
    )


def loss_agg_norm_const(config: PPOConfig) -> float:
    """Return --loss_agg_norm_const or else the longest response, in tokens."""
    return config.algorithm.loss_agg_norm_const or float(config.sampling.lengths.response)


# -- names that flags give -------------------------------------------------------------------------

MODELS = (
    "pretrain",
    "ref_pretrain",
    "critic_pretrain",
    "reward_pretrain",
    "teacher_pretrain",
    "model_path",
)
DATA = ("prompt_data", "dataset", "eval_dataset", "ptx_data")


def given_names(config: Any, flags: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return those of ``flags`` that a command has and that are given, with their values."""
    groups = [vars(group) for group in vars(config).values() if hasattr(group, "__dict__")]
    return [(f, group[f]) for f in flags for group in groups if group.get(f) is not None]


def given_models(config: Any) -> list[tuple[str, str]]:
    """Return each model that a flag or the file of --teacher_routing names, with the flag."""
    named = [
        (flag, name)
        for flag, names in given_names(config, MODELS)
        for name in (split(names) or [""] if flag == "reward_pretrain" else [names])
    ]
    return named + [("teacher_routing", name) for name in routed_models(config)]


def is_local(name: str) -> bool:
    """Return whether a name means a path, and not ``name`` or ``owner/name`` on the Hub."""
    path = Path(name).expanduser()
    in_sight = len(path.parts) > 1 and Path(path.parts[0]).is_dir()
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists() or in_sight
