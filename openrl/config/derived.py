"""What follows from the flags, each fact computed in one place. What only the cluster or the data
knows is an argument."""

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

if TYPE_CHECKING:  # the groups below take their conditions from here
    from openrl.config.agents import EnvironmentFlags
    from openrl.config.algorithm import LossAggMode
    from openrl.config.commands import (
        BatchInferenceConfig,
        DPOConfig,
        EvaluateConfig,
        PPOConfig,
        ServeConfig,
        SupervisedConfig,
    )
    from openrl.config.learning import RolloutBatchFlags, SupervisedBatchFlags
    from openrl.config.lora import LoRAFlags
    from openrl.config.model import Dtype, ModelFlags
    from openrl.config.rollout import (
        ClusterFlags,
        PlacementFlags,
        RankFlags,
    )
    from openrl.config.run import LoggingFlags
    from openrl.config.shaping import NormScope

COMPLETE_CHECKPOINTS = "step_*/manifest.json"
"""Glob under --ckpt_path: the manifest is in a checkpoint before the checkpoint gets its name."""

FLOORED_SCHEDULES = ("cosine_with_min_lr", "warmup_stable_decay")
"""Schedules that end at --min_lr_ratio; the others end where their formula does."""

# -- batches and steps -----------------------------------------------------------------------------


def samples_per_step(batch: RolloutBatchFlags) -> int:
    """Responses of one rollout."""
    return batch.rollout_batch_size * batch.n_samples_per_prompt


def optimizer_steps_per_rollout(batch: RolloutBatchFlags) -> int:
    """Optimizer steps that one rollout is cut into, over all epochs."""
    return -(-samples_per_step(batch) // batch.train_batch_size) * batch.max_epochs


def prompts_running(config: PPOConfig) -> int:
    """Prompts that run or are complete at a time, for one training step."""
    size = config.collecting.vllm_generate_batch_size or config.environments.env_groups
    return size or math.ceil(config.asynchrony.oversample_ratio * config.batch.rollout_batch_size)


def prompts_to_try(config: PPOConfig, n_prompts: int) -> int:
    """Most prompts that one training step may try: each of ``n_prompts`` once, and each environment
    --env_max_trajectories."""
    most = config.environments.env_max_trajectories
    return min(n_prompts, most * prompts_running(config)) if most > 0 else n_prompts


def steps_ahead(config: PPOConfig) -> int:
    """Training steps that generation may run ahead of training."""
    return config.asynchrony.async_queue_size if config.asynchrony.async_train else 0


def carries_over(config: PPOConfig) -> bool:
    """Whether what is unfinished when a training step has its groups goes on in a later one."""
    return config.asynchrony.partial_rollout or config.asynchrony.async_train


def max_staleness(config: PPOConfig) -> int:
    """Most weight syncs between the sampling of a token and its optimizer step."""
    asked = config.asynchrony.max_staleness
    if asked is None or not carries_over(config):
        return steps_ahead(config) or int(config.asynchrony.partial_rollout)
    return asked


def total_steps(batch: RolloutBatchFlags, n_prompts: int) -> int:
    """Steps of a run. The last one of the last episode is filled up with prompts of the next
    pass."""
    if batch.max_steps > 0:
        return batch.max_steps
    return -(-batch.num_episodes * n_prompts // batch.rollout_batch_size)


def total_optimizer_steps(batch: RolloutBatchFlags, n_prompts: int) -> int:
    """What learning-rate schedules count to."""
    return total_steps(batch, n_prompts) * optimizer_steps_per_rollout(batch)


def supervised_steps(batch: SupervisedBatchFlags, n_rows: int) -> int:
    """Optimizer steps of a supervised run. The last one is filled up with rows of the next pass."""
    if batch.max_steps > 0:
        return batch.max_steps
    return -(-batch.max_epochs * n_rows // batch.train_batch_size)


def packs(config: PPOConfig | SupervisedConfig) -> bool:
    """Whether micro-batches run as one row without padding."""
    asked = config.packing.packing_samples or shares_prefixes(config)
    return asked or config.dynamic.use_dynamic_batch or config.parallel.ring_attn_size > 1


def shares_prefixes(config: PPOConfig | SupervisedConfig) -> bool:
    """Whether the answers to a prompt share what they begin with."""
    return hasattr(config.packing, "prefix_grouper") and config.packing.prefix_grouper


def loaded(config: PPOConfig | SupervisedConfig) -> ModelFlags:
    """How models are loaded: for shared prefixes with the one attention that knows them."""
    if shares_prefixes(config):
        return replace(config.model, attn_implementation="varlen")
    return config.model


def most_tokens(config: PPOConfig | SupervisedConfig, cap: int) -> int:
    """Tokens of a micro-batch of which each rank that splits its sequences holds at most
    ``cap``."""
    return cap * config.parallel.sequence_size


def under_ray(flags: RankFlags) -> bool:
    """Whether the ranks of a command with one model are Ray's workers."""
    return (
        flags.num_gpus_per_node is not None or flags.num_nodes > 1 or flags.ray_address is not None
    )


def preference_loss(config: DPOConfig) -> Entry[Any]:
    """The chosen --loss."""
    return preference_losses[config.preference.loss]


def rated(config: DPOConfig) -> bool:
    """Whether answers are rated one by one instead of compared in pairs."""
    return "ratings" in preference_loss(config).needs


def preference_reference(config: DPOConfig) -> str | None:
    """The frozen model that log-probs are compared with; None if the loss needs none."""
    options = config.options["loss"]
    free = hasattr(options, "reference_free") and options.reference_free
    if free or "reference" not in preference_loss(config).needs:
        return None
    return config.reference.ref_pretrain or config.model.pretrain


def reference_lora(config: DPOConfig) -> LoRAFlags:
    """What the reference has of the LoRA flags: the adapter that training starts from, unless it is
    another model."""
    path = config.lora.lora_adapter_path if config.reference.ref_pretrain is None else None
    return replace(config.lora, lora_rank=0, lora_adapter_path=path)  # type: ignore[type-var]


def longest_sequence(config: PPOConfig) -> int:
    """Most tokens of prompt and response together that engines are asked for, in training or
    evaluation."""
    lengths, evaluated = config.sampling.lengths, config.evaluation.eval_generate_max_len
    return max(lengths.both, lengths.prompt + evaluated) if evaluated else lengths.both


def evaluates(config: PPOConfig) -> bool:
    """Whether anything asks for an evaluation."""
    flags = config.evaluation
    return flags.eval_steps > 0 or flags.eval_before_train or flags.eval_only


def data_seed(config: Any) -> int:
    """Seed of the row order of any command: --data_seed, else --seed."""
    return config.debug.seed if config.order.data_seed is None else config.order.data_seed


def agents_of(config: PPOConfig | EvaluateConfig) -> list[str]:
    """The flags that say who plays; none: the policy answers once."""
    asked = {
        "agent_func_path": config.agents.agent_func_path,
        "agent_command": config.agents.agent_command,
        "env_tags": config.environments.env_tags,
        "tools": config.agents.tools,
    }
    return [name for name, value in asked.items() if value]


def groups_per_tag(flags: EnvironmentFlags, groups: int) -> dict[str, int]:
    """How many of ``groups`` each of --env_tags gets: as given, else evenly, the first ones one
    more."""
    tags = flags.env_tags
    even = tuple(groups // len(tags) + (place < groups % len(tags)) for place in range(len(tags)))
    return dict(zip(tags, flags.env_groups_per_tag or even, strict=True))


# -- models ----------------------------------------------------------------------------------------


def estimator(config: PPOConfig) -> Entry[Any]:
    """The chosen --advantage_estimator."""
    return advantage_estimators[config.algorithm.advantage_estimator]


def needs_critic(config: PPOConfig) -> bool:
    return "values" in estimator(config).needs


def needs_reference(config: PPOConfig) -> bool:
    return config.kl.in_reward or config.kl.in_loss or config.kl.log_ref_kl


def policy_is_reference(config: PPOConfig) -> bool:
    """Whether the reference is the policy's own base, adapters off: a second copy would hold the
    same weights."""
    return needs_reference(config) and config.lora.adapts and config.others.ref_pretrain is None


def lora_rank(flags: LoRAFlags) -> int:
    """--lora_rank, or that of the adapter to start from; 0: no adapters."""
    if flags.lora_adapter_path is None:
        return flags.lora_rank
    path = Path(flags.lora_adapter_path).expanduser() / "adapter_config.json"
    # on the Hub: peft reads it where it is used
    return json.loads(path.read_text())["r"] if path.is_file() else 16


def critic_adapters(flags: LoRAFlags) -> LoRAFlags:
    """The adapter of --lora_adapter_path is the policy's; a critic gets a new one of its rank."""
    return replace(flags, lora_rank=lora_rank(flags), lora_adapter_path=None)


def source_kinds(
    config: PPOConfig | ServeConfig | BatchInferenceConfig | EvaluateConfig,
) -> set[str]:
    """Kinds of the reward sources; empty if they cannot be read, which another rule reports."""
    models = (config.rm if hasattr(config, "rm") else config.others).reward_pretrain
    try:
        return {source.kind for source in reward_sources(config.reward, models)}
    except UserError:
        return set()


def rewards(config: PPOConfig) -> RewardPlan:
    """The sources of rewards and their weights. Raises UserError."""
    return reward_plan(config.reward, config.others.reward_pretrain)


def replays(config: PPOConfig) -> bool:
    """Whether rollouts come from files, scored: there are no engines then."""
    return config.collecting.rollout_replay_dir is not None


def model_roles(config: PPOConfig) -> tuple[str, ...]:
    """The models that run, by the names that placement and metrics use."""
    wanted = {
        "actor": True,
        "critic": needs_critic(config),
        "reference": needs_reference(config) and not policy_is_reference(config),
        "reward": config.others.reward_pretrain is not None and not replays(config),
    }
    return tuple(role for role, needed in wanted.items() if needed)


def compared_dtype(config: PPOConfig) -> Dtype:
    """What log-probs of engine and trainer can be compared in: the coarser of their types."""
    coarse: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")
    used = (config.model.param_dtype, config.engine.vllm_dtype)
    return next((dtype for dtype in coarse if dtype in used), config.model.param_dtype)


def process_environment(flags: PlacementFlags) -> dict[str, str]:
    """--system_envs as name -> value."""
    return dict(pair.split("=", 1) for pair in flags.system_envs)


def cluster_address(flags: ClusterFlags) -> str | None:
    """The cluster to join: --ray_address, else $RAY_ADDRESS; None: start one."""
    return flags.ray_address or os.environ.get("RAY_ADDRESS") or None


# -- sleep -----------------------------------------------------------------------------------------


def ref_reward_streams(config: PPOConfig) -> bool:
    """--ref_reward_offload by ZeRO 3: DeepSpeed fetches weights layer by layer, in each pass."""
    return config.hybrid.ref_reward_offload and config.deepspeed.zero_stage == 3


def ref_reward_sleeps(config: PPOConfig) -> bool:
    """--ref_reward_offload without ZeRO 3: whole models move in and out, when others need their
    places."""
    return config.hybrid.ref_reward_offload and config.deepspeed.zero_stage < 3


# -- the KL to the reference -----------------------------------------------------------------------


def full_kl_top_k(config: PPOConfig) -> int | None:
    """--kl_full_topk where some estimator compares whole distributions, else None."""
    flags = config.kl
    used = {flags.measured_estimator} if needs_reference(config) else set()
    used |= {flags.loss_estimator} if flags.in_loss else set()
    return flags.kl_full_topk if "full" in used else None


# -- what loss and estimator suggest ---------------------------------------------------------------


OldLogprobs = Literal["forward", "update", "engine"]


def old_logprobs(config: PPOConfig) -> OldLogprobs:
    """Where old log-probs come from.

    forward: a pass of the policy before its update, for several optimizer steps, KL in the reward,
        correction, or a loss that asks for it. update: the update's own, of a single optimizer
        step. engine: what the engine sampled with."""
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
    """Whether old log-probs of rows without a gradient are read as well: by rewards, by tests that
    take tokens out of the counts, by means over the batch, or because they were asked for."""
    flags = config.correction
    return (
        config.kl.in_reward
        or bool(flags.rollout_rs)
        or (flags.enable_vllm_is_correction and flags.vllm_is_batch_normalize)
        or "old_logprobs" in policy_losses[config.algorithm.policy_loss_type].needs
        or flags.skip_old_logprob == "never"
    )


def frozen_actor_steps(config: PPOConfig) -> int:
    """Steps at the start of a run that train the critic only."""
    return config.algorithm.freezing_actor_steps + 1


def loss_agg_norm_const(config: PPOConfig) -> float:
    """--loss_agg_norm_const, else the longest response; tokens."""
    return config.algorithm.loss_agg_norm_const or float(config.sampling.lengths.response)


def loss_agg_mode(config: PPOConfig) -> LossAggMode:
    """--loss_agg_mode, else what the policy loss suggests, else the estimator, else token-mean."""
    loss = policy_losses[config.algorithm.policy_loss_type]
    modes = [
        config.algorithm.loss_agg_mode,
        *(e.suggests.get("loss_agg_mode") for e in (loss, estimator(config))),
    ]
    return next((mode for mode in modes if mode is not None), "token-mean")


def reward_norm_scopes(config: PPOConfig) -> tuple[NormScope, NormScope]:
    """Scopes of mean and std: --reward_norm_mean and --reward_norm_std, else what the estimator
    suggests, else none."""
    suggests = estimator(config).suggests
    mean = config.shaping.reward_norm_mean or suggests.get("reward_norm_mean", "none")
    return mean, config.shaping.reward_norm_std or suggests.get("reward_norm_std", "none")


def whiten_advantages(config: PPOConfig) -> bool:
    """--whiten_advantages, else what the estimator suggests, else no."""
    chosen = config.algorithm.whiten_advantages
    return estimator(config).suggests.get("whiten_advantages", False) if chosen is None else chosen


def trackers(flags: LoggingFlags) -> tuple[str, ...]:
    """Every tracker that a flag asks for, once."""
    switches = {"tensorboard": flags.use_tensorboard is not None, "wandb": flags.use_wandb}
    asked = [name for name, on in switches.items() if on]
    return tuple(dict.fromkeys([*asked, *flags.track_with]))
