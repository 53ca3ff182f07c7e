"""What follows from flags of several groups, each fact computed in one place; what follows from one
group is a property of the group. What only the cluster or the data knows is an argument."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from openrl.config.commands import AnsweringConfig, DPOConfig, PPOConfig, TrainingConfig
from openrl.config.groups.lora import LoRAFlags
from openrl.config.groups.model import Dtype, ModelFlags
from openrl.config.reward_plan import RewardPlan, reward_plan
from openrl.flags.checks import in_use

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


def packs(config: TrainingConfig) -> bool:
    """Return whether each micro-batch runs as one row without padding."""
    asked = config.packing.packing_samples or config.packing.shares_prefixes
    return asked or config.dynamic.use_dynamic_batch or config.parallel.ring_attn_size > 1


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


def longest_sequence(config: PPOConfig | AnsweringConfig) -> int:
    """Return the most tokens of prompt and response together that engines are asked for."""
    lengths = config.sampling.lengths
    evaluated = isinstance(config, PPOConfig) and config.evaluation.eval_generate_max_len
    return max(lengths.both, lengths.prompt + evaluated) if evaluated else lengths.both


def data_seed(config: Any) -> int:
    """Return the seed of any command's row order: --data_seed or else --seed."""
    return config.debug.seed if config.order.data_seed is None else config.order.data_seed


def agents_of(config: PPOConfig | AnsweringConfig) -> tuple[str, ...]:
    """Return the flags that say who plays; with none, the policy answers once."""
    return in_use(config, "agent_func_path", "agent_command", "env_tags", "tools")


# -- models ----------------------------------------------------------------------------------------


def rewards(config: PPOConfig) -> RewardPlan:
    """Return the sources of rewards and their weights. Raises UserError."""
    return reward_plan(config.reward, config.others.reward_pretrain)


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


# -- losses ----------------------------------------------------------------------------------------


OldLogprobs = Literal["forward", "update", "engine"]


def old_logprobs(config: PPOConfig) -> OldLogprobs:
    """Return where old log-probs come from.

    - forward: a pass of the policy before its update, for several optimizer steps, KL in the
      reward, some corrections (``corrects_early``), or a loss that needs it.
    - update: the update's own pass, with a single optimizer step.
    - engine: the log-probs that the engine sampled with.
    """
    skip = config.correction.skip_old_logprob
    if skip == "always":
        return "engine"
    needs = config.algorithm.policy_loss.needs
    early = config.kl.in_reward or corrects_early(config) or "old_logprobs" in needs
    several = config.batch.optimizer_steps_per_rollout > 1
    return "forward" if skip == "never" or early or several else "update"


def corrects_early(config: PPOConfig) -> bool:
    """Return whether the correction of rollouts needs old log-probs before the update: for tests
    that remove tokens from the counts, for a mean over the batch, for weights that depend on other
    rows, or because the update's own have dropout in them. Recorded rollouts may have been an
    agent's, and a replay must weigh as the recorded run did."""
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
        or flags.skip_old_logprob == "never"
    )


def loss_agg_norm_const(config: PPOConfig) -> float:
    """Return --loss_agg_norm_const or else the longest response, in tokens."""
    return config.algorithm.loss_agg_norm_const or float(config.sampling.lengths.response)
