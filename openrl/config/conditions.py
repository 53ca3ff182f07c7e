"""When flags act, where that depends on several flags or on flags of another group."""

from __future__ import annotations

from typing import Any

from openrl.flags.schema import Condition, given

# -- models

CRITIC = Condition(
    lambda config: config.algorithm.needs_critic,
    "with an --advantage_estimator that has a critic, such as gae",
)
REFERENCE = Condition(
    lambda config: config.kl.needs_reference, "with --init_kl_coef, --kl_loss_coef or --log_ref_kl"
)
SECOND_REFERENCE = Condition(
    lambda config: not config.policy_is_reference,
    "without adapters, whose base is the reference, or with --ref_pretrain",
)
PREFERENCE_REFERENCE = Condition(
    lambda config: config.reference_pretrain is not None,
    "with a --loss that has a reference, such as dpo, and without --reference_free",
)
FROZEN_MODEL = Condition(
    lambda config: not {"reference", "reward", "teacher"}.isdisjoint(config.model_roles),
    "with a reference model of its own, --reward_pretrain or --teacher_pretrain",
)
TEACHER = Condition(
    lambda config: config.teacher.used, "with a teacher, such as --teacher_pretrain"
)
DIVERGENCE = Condition(
    lambda config: config.teacher.used and config.teacher.divergence is not None,
    "with a --teacher_mode that compares distributions",
)
HEADS = CRITIC | given("reward_pretrain")
REWARD_MODEL = given("reward_pretrain") | given("eval_task", "rm")
CRITIC_AND_REWARD = Condition(
    lambda config: {"critic", "reward"} <= {*config.model_roles},
    "with both a critic and --reward_pretrain",
)

# -- engines, places and memory

VLLM = given("rollout_backend", "vllm") | given("eval_task", "generate_vllm")
RAY = Condition(
    lambda config: not hasattr(config, "ranks") or config.ranks.under_ray,
    "with --num_gpus_per_node",
)
LAUNCHER = Condition(lambda config: not config.ranks.under_ray, "without --num_gpus_per_node")
RING = Condition(lambda config: config.parallel.ring_attn_size > 1, "with --ring_attn_size above 1")
RESUME = given("load_checkpoint") | given("resume_from_checkpoint")
SEVERAL_STEPS = Condition(
    lambda config: config.batch.optimizer_steps_per_rollout > 1,
    "with several optimizer steps per rollout",
)

# -- logging

TRACED = Condition(
    lambda config: config.trace.trace_sample_rate > 0 or config.collecting.rollout_dump_dir,
    "with --trace_sample_rate above 0",
)
TRACKED = Condition(
    lambda config: config.logging.trackers,
    "with a tracker: --use_tensorboard, --use_wandb or --track_with",
)
WANDB = Condition(lambda config: "wandb" in config.logging.trackers, "with --use_wandb")
PROJECTS = Condition(
    lambda config: not {"tensorboard"}.issuperset(config.logging.trackers),
    "with --use_wandb or --track_with",
)

# -- the KL to the reference

KL_TERM = Condition(
    lambda config: config.kl.in_reward or config.kl.in_loss, "with --init_kl_coef or --kl_loss_coef"
)
NO_KL_TERM = Condition(
    lambda config: not KL_TERM.holds(config), "with --init_kl_coef 0: a KL term is logged anyway"
)
KL_ESTIMATED = Condition(
    lambda config: config.kl.in_reward or config.kl.kl_loss_estimator is None,
    "without --kl_loss_estimator, or with the KL in the reward",
)
KL_CONTROLLED = Condition(
    lambda config: config.kl.controlled or not config.kl.in_loss,
    "without --kl_loss_coef, which fixes the coefficient",
)
KL_STARTS = Condition(
    lambda config: config.kl.init_kl_coef == 0 or KL_CONTROLLED.holds(config), KL_CONTROLLED.words
)
FULL_KL = Condition(
    lambda config: config.kl.full_top_k is not None, "with a KL estimator that is full"
)
RL_LOSS = given("rl_loss_coef")

# -- losses and rewards

NORM_CONST = Condition(
    lambda config: config.algorithm.aggregation == "seq-mean-token-sum-norm",
    "with --loss_agg_mode seq-mean-token-sum-norm",
)
WHITENED = Condition(lambda config: config.algorithm.whitens, "with --whiten_advantages")
REWARDS_NORMED = Condition(
    lambda config: set(config.reward_norm_scopes) != {"none"},
    "with --reward_norm_mean or --reward_norm_std",
)
SHAPED = Condition(
    lambda config: "reward_parts" not in config.algorithm.estimator.needs,
    "with an --advantage_estimator that does not read the parts of the reward",
)
EVALUATES = Condition(lambda config: config.evaluation.eval_steps > 0, "with --eval_steps N")
LOGITS = Condition(
    lambda config: not hasattr(config, "reward_loss"),
    "with a model that has logits, which a reward model does not",
)
PAIRS = Condition(
    lambda config: not hasattr(config, "preference") or not config.preference.rated,
    "with a --loss of pairs, such as dpo",
)


def _siblings_meet(config: Any) -> bool:
    """Return whether a micro-batch may hold answers that begin alike."""
    if not hasattr(config, "collecting"):
        return PAIRS.holds(config)
    several = config.dynamic.use_dynamic_batch or config.batch.micro_train_batch_size > 1
    return config.batch.n_samples_per_prompt > 1 and several


SIBLINGS = Condition(_siblings_meet, "with several answers to a prompt in a micro-batch")
