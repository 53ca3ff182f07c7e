"""Everything that follows from the flags, each fact computed in one place. What only the cluster or
the data knows is an argument."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from openrl.config.reward_plan import RewardPlan, reward_plan, reward_sources
from openrl.errors import UserError
from openrl.extension_points import advantage_estimators, policy_losses, preference_losses
from openrl.registry import Entry

if TYPE_CHECKING:  # the groups below take their conditions from this module
    from openrl.config.commands import (
        BatchInferenceConfig,
        DPOConfig,
        EvaluateConfig,
        PPOConfig,
        ServeConfig,
        SupervisedConfig,
    )
    from openrl.config.groups.agent import EnvironmentFlags
    from openrl.config.groups.algorithm import LossAggMode
    from openrl.config.groups.batch import RolloutBatchFlags, SupervisedBatchFlags
    from openrl.config.groups.logging import LoggingFlags
    from openrl.config.groups.lora import LoRAFlags
    from openrl.config.groups.model import Dtype, ModelFlags
    from openrl.config.groups.placement import ClusterFlags, PlacementFlags, RankFlags
    from openrl.config.groups.reward_shaping import NormScope

COMPLETE_CHECKPOINTS = "step_*/manifest.json"
"""Glob under --ckpt_path. A checkpoint gets its name only after its manifest was written."""

FLOORED_SCHEDULES = ("cosine_with_min_lr", "warmup_stable_decay")
"""Schedules that end at --min_lr_ratio; the others end where their formulas do."""

# -- batches and steps -----------------------------------------------------------------------------


def samples_per_step(batch: RolloutBatchFlags) -> int:
    """Return the number of responses in one rollout."""
    return batch.rollout_batch_size * batch.n_samples_per_prompt


def optimizer_steps_per_rollout(batch: RolloutBatchFlags) -> int:
    """Return how many optimizer steps one rollout is cut into, over all epochs."""
    return -(-samples_per_step(batch) // batch.train_batch_size) * batch.max_epochs


def prompts_running(config: PPOConfig) -> int:
    """Return how many prompts may be running or complete at a time for one training step."""
    size = config.collecting.vllm_generate_batch_size or config.environments.env_groups
    return size or math.ceil(config.asynchrony.oversample_ratio * config.batch.rollout_batch_size)


def prompts_to_try(config: PPOConfig, n_prompts: int) -> int:
    """Return how many prompts one training step may try: each of ``n_prompts`` once, but each
    environment at most --env_max_trajectories."""
    most = config.environments.env_max_trajectories
    return min(n_prompts, most * prompts_running(config)) if most > 0 else n_prompts


def steps_ahead(config: PPOConfig) -> int:
    """Return how many training steps generation may run ahead of training."""
    return config.asynchrony.async_queue_size if config.asynchrony.async_train else 0


def carries_over(config: PPOConfig) -> bool:
    """Return whether groups that are unfinished when a training step has its groups continue in a
    later one."""
    return config.asynchrony.partial_rollout or config.asynchrony.async_train


def max_staleness(config: PPOConfig) -> int:
    """Return the most weight syncs allowed between the sampling of a token and its optimizer
    step."""
    asked = config.asynchrony.max_staleness
    if asked is None or not carries_over(config):
        return steps_ahead(config) or int(config.asynchrony.partial_rollout)
    return asked


def total_steps(batch: RolloutBatchFlags, n_prompts: int) -> int:
    """Return the steps of a run. Prompts of the next pass fill up the last step of the last
    episode."""
    if batch.max_steps > 0:
        return batch.max_steps
    return -(-batch.num_episodes * n_prompts // batch.rollout_batch_size)


def total_optimizer_steps(batch: RolloutBatchFlags, n_prompts: int) -> int:
    """Return the number of optimizer steps that learning-rate schedules span."""
    return total_steps(batch, n_prompts) * optimizer_steps_per_rollout(batch)


def supervised_steps(batch: SupervisedBatchFlags, n_rows: int) -> int:
    """Return the optimizer steps of a supervised run. Rows of the next pass fill up the last
    one."""
    if batch.max_steps > 0:
        return batch.max_steps
    return -(-batch.max_epochs * n_rows // batch.train_batch_size)


def packs(config: PPOConfig | SupervisedConfig) -> bool:
    """Return whether each micro-batch runs as one row without padding."""
    asked = config.packing.packing_samples or shares_prefixes(config)
    return asked or config.dynamic.use_dynamic_batch or config.parallel.ring_attn_size > 1


def shares_prefixes(config: PPOConfig | SupervisedConfig) -> bool:
    """Return whether the answers to a prompt share their common prefix."""
    return hasattr(config.packing, "prefix_grouper") and config.packing.prefix_grouper


def loaded(config: PPOConfig | SupervisedConfig) -> ModelFlags:
    """Return how models are loaded; with shared prefixes, the only attention that supports them is
    chosen."""
    if shares_prefixes(config):
        return replace(config.model, attn_implementation="varlen")
    return config.model


def most_tokens(config: PPOConfig | SupervisedConfig, cap: int) -> int:
    """Return the most tokens in a micro-batch of which each rank holds at most ``cap``, when
    sequences are split over ranks."""
    return cap * config.parallel.sequence_size


def under_ray(flags: RankFlags) -> bool:
    """Return whether the ranks of a command with one model are Ray workers."""
    return (
        flags.num_gpus_per_node is not None or flags.num_nodes > 1 or flags.ray_address is not None
    )


def preference_loss(config: DPOConfig) -> Entry[Any]:
    """Return the chosen --loss."""
    return preference_losses[config.preference.loss]


def rated(config: DPOConfig) -> bool:
    """Return whether answers are rated one by one instead of compared in pairs."""
    return "ratings" in preference_loss(config).needs


def preference_reference(config: DPOConfig) -> str | None:
    """Return the frozen model that log-probs are compared with; None if the loss needs none."""
    options = config.options["loss"]
    free = hasattr(options, "reference_free") and options.reference_free
    if free or "reference" not in preference_loss(config).needs:
        return None
    return config.reference.ref_pretrain or config.model.pretrain


def reference_lora(config: DPOConfig) -> LoRAFlags:
    """Return the LoRA flags of the reference: the adapter that training starts from, unless the
    reference is another model."""
    path = config.lora.lora_adapter_path if config.reference.ref_pretrain is None else None
    return replace(config.lora, lora_rank=0, lora_adapter_path=path)  # type: ignore[type-var]


def longest_sequence(config: PPOConfig) -> int:
    """Return the most tokens of prompt and response together that engines are asked for, in
    training or evaluation."""
    lengths, evaluated = config.sampling.lengths, config.evaluation.eval_generate_max_len
    return max(lengths.both, lengths.prompt + evaluated) if evaluated else lengths.both


def evaluates(config: PPOConfig) -> bool:
    """Return whether any flag asks for an evaluation."""
    flags = config.evaluation
    return flags.eval_steps > 0 or flags.eval_before_train or flags.eval_only


def data_seed(config: Any) -> int:
    """Return the seed of any command's row order: --data_seed or else --seed."""
    return config.debug.seed if config.order.data_seed is None else config.order.data_seed


def agents_of(config: PPOConfig | EvaluateConfig) -> list[str]:
    """Return the flags that say who plays; with none, the policy answers once."""
    asked = {
        "agent_func_path": config.agents.agent_func_path,
        "agent_command": config.agents.agent_command,
        "env_tags": config.environments.env_tags,
        "tools": config.agents.tools,
    }
    return [name for name, value in asked.items() if value]


def groups_per_tag(flags: EnvironmentFlags, groups: int) -> dict[str, int]:
    """Return how many of ``groups`` each of --env_tags gets: as given, or else evenly, where the
    first ones may get one more."""
    tags = flags.env_tags
    even = tuple(groups // len(tags) + (place < groups % len(tags)) for place in range(len(tags)))
    return dict(zip(tags, flags.env_groups_per_tag or even, strict=True))


# -- models ----------------------------------------------------------------------------------------


def estimator(config: PPOConfig) -> Entry[Any]:
    """Return the chosen --advantage_estimator."""
    return advantage_estimators[config.algorithm.advantage_estimator]


def needs_critic(config: PPOConfig) -> bool:
    return "values" in estimator(config).needs


def needs_reference(config: PPOConfig) -> bool:
    return config.kl.in_reward or config.kl.in_loss or config.kl.log_ref_kl


def policy_is_reference(config: PPOConfig) -> bool:
    """Return whether the reference is the policy's own base, with the adapters off: a second copy
    would hold the same weights."""
    return needs_reference(config) and config.lora.adapts and config.others.ref_pretrain is None


def lora_rank(flags: LoRAFlags) -> int:
    """Return --lora_rank, or the rank of the adapter to start from; 0 means no adapters."""
    if flags.lora_adapter_path is None:
        return flags.lora_rank
    path = Path(flags.lora_adapter_path).expanduser() / "adapter_config.json"
    # an adapter on the Hub counts as rank 16; peft reads the true rank when it loads the adapter
    return json.loads(path.read_text())["r"] if path.is_file() else 16


def critic_adapters(flags: LoRAFlags) -> LoRAFlags:
    """Return the LoRA flags of a critic. The adapter of --lora_adapter_path is the policy's; a
    critic gets a fresh one of the same rank."""
    return replace(flags, lora_rank=lora_rank(flags), lora_adapter_path=None)


def source_kinds(
    config: PPOConfig | ServeConfig | BatchInferenceConfig | EvaluateConfig,
) -> set[str]:
    """Return the kinds of the reward sources; empty if they cannot be read, which another rule
    reports."""
    models = (config.rm if hasattr(config, "rm") else config.others).reward_pretrain
    try:
        return {source.kind for source in reward_sources(config.reward, models)}
    except UserError:
        return set()


def rewards(config: PPOConfig) -> RewardPlan:
    """Return the sources of rewards and their weights. Raises UserError."""
    return reward_plan(config.reward, config.others.reward_pretrain)


def replays(config: PPOConfig) -> bool:
    """Return whether scored rollouts come from files; there are no engines then."""
    return config.collecting.rollout_replay_dir is not None


def model_roles(config: PPOConfig) -> tuple[str, ...]:
    """Return the models that run, by the names that placement and metrics use."""
    wanted = {
        "actor": True,
        "critic": needs_critic(config),
        "reference": needs_reference(config) and not policy_is_reference(config),
        "reward": config.others.reward_pretrain is not None and not replays(config),
    }
    return tuple(role for role, needed in wanted.items() if needed)


def compared_dtype(config: PPOConfig) -> Dtype:
    """Return the dtype in which log-probs of engine and trainer can be compared: the coarser of
    theirs."""
    coarse: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")
    used = (config.model.param_dtype, config.engine.vllm_dtype)
    return next((dtype for dtype in coarse if dtype in used), config.model.param_dtype)


def process_environment(flags: PlacementFlags) -> dict[str, str]:
    """Parse --system_envs into name -> value."""
    return dict(pair.split("=", 1) for pair in flags.system_envs)


def cluster_address(flags: ClusterFlags) -> str | None:
    """Return the address of the cluster to join, --ray_address or else $RAY_ADDRESS; None starts a
    new one."""
    return flags.ray_address or os.environ.get("RAY_ADDRESS") or None


# -- sleep -----------------------------------------------------------------------------------------


def ref_reward_streams(config: PPOConfig) -> bool:
    """Return whether --ref_reward_offload uses ZeRO 3, where DeepSpeed fetches weights layer by
    layer in each pass."""
    return config.hybrid.ref_reward_offload and config.deepspeed.zero_stage == 3


def ref_reward_sleeps(config: PPOConfig) -> bool:
    """Return whether --ref_reward_offload works without ZeRO 3, by moving whole models out when
    others need their places and back in."""
    return config.hybrid.ref_reward_offload and config.deepspeed.zero_stage < 3


# -- the KL to the reference -----------------------------------------------------------------------


def full_kl_top_k(config: PPOConfig) -> int | None:
    """Return --kl_full_topk if some estimator compares whole distributions, else None."""
    flags = config.kl
    used = {flags.measured_estimator} if needs_reference(config) else set()
    used |= {flags.loss_estimator} if flags.in_loss else set()
    return flags.kl_full_topk if "full" in used else None


# -- what loss and estimator suggest ---------------------------------------------------------------


OldLogprobs = Literal["forward", "update", "engine"]


def old_logprobs(config: PPOConfig) -> OldLogprobs:
    """Return where old log-probs come from.

    - forward: a pass of the policy before its update, for several optimizer steps, KL in the
      reward, correction, or a loss that needs it.
    - update: the update's own pass, with a single optimizer step.
    - engine: the log-probs that the engine sampled with.
    """
    skip = config.correction.skip_old_logprob
    if skip == "always":
        return "engine"
    corrects = config.correction.enable_vllm_is_correction or bool(config.correction.rollout_rs)
    early = (
        config.kl.in_reward
        or corrects
        or "old_logprobs" in policy_losses[config.algorithm.policy_loss_type].needs
    )
    several = optimizer_steps_per_rollout(config.batch) > 1
    return "forward" if skip == "never" or early or several else "update"


def reads_all_old_logprobs(config: PPOConfig) -> bool:
    """Return whether old log-probs are also needed for rows without a gradient: for rewards, for
    tests that remove tokens from the counts, for means over the batch, or because the user asked
    for them."""
    flags = config.correction
    return (
        config.kl.in_reward
        or bool(flags.rollout_rs)
        or (flags.enable_vllm_is_correction and flags.vllm_is_batch_normalize)
        or "old_logprobs" in policy_losses[config.algorithm.policy_loss_type].needs
        or flags.skip_old_logprob == "never"
    )


def frozen_actor_steps(config: PPOConfig) -> int:
    """Return the number of steps at the start of a run that train only the critic."""
    return config.algorithm.freezing_actor_steps + 1


def loss_agg_norm_const(config: PPOConfig) -> float:
    """Return --loss_agg_norm_const or else the longest response, in tokens."""
    return config.algorithm.loss_agg_norm_const or float(config.sampling.lengths.response)


def loss_agg_mode(config: PPOConfig) -> LossAggMode:
    """Return --loss_agg_mode, or else what the policy loss suggests, or else the estimator, or else
    token-mean."""
    loss = policy_losses[config.algorithm.policy_loss_type]
    modes = [
        config.algorithm.loss_agg_mode,
        *(e.suggests.get("loss_agg_mode") for e in (loss, estimator(config))),
    ]
    return next((mode for mode in modes if mode is not None), "token-mean")


def reward_norm_scopes(config: PPOConfig) -> tuple[NormScope, NormScope]:
    """Return the scopes of mean and std: --reward_norm_mean and --reward_norm_std, or else what the
    estimator suggests, or else none."""
    suggests = estimator(config).suggests
    mean = config.shaping.reward_norm_mean or suggests.get("reward_norm_mean", "none")
    return mean, config.shaping.reward_norm_std or suggests.get("reward_norm_std", "none")


def whiten_advantages(config: PPOConfig) -> bool:
    """Return --whiten_advantages, or else what the estimator suggests, or else False."""
    chosen = config.algorithm.whiten_advantages
    return estimator(config).suggests.get("whiten_advantages", False) if chosen is None else chosen


def trackers(flags: LoggingFlags) -> tuple[str, ...]:
    """Return every tracker that a flag asks for, once."""
    switches = {"tensorboard": flags.use_tensorboard is not None, "wandb": flags.use_wandb}
    asked = [name for name, on in switches.items() if on]
    return tuple(dict.fromkeys([*asked, *flags.track_with]))
