"""Flags of learning that do nothing in the company of others."""

from __future__ import annotations

from openrl.config.commands import TRAINING, DPOConfig
from openrl.config.derived import (
    FLOORED_SCHEDULES,
    estimator,
    full_kl_top_k,
    kl_controller_acts,
    kl_in_loss,
    kl_in_reward,
    loss_agg_mode,
    needs_critic,
    needs_reference,
    optimizer_steps_per_rollout,
    policy_is_reference,
    rated,
    reward_norm_scopes,
    whiten_advantages,
)
from openrl.config.rules.idle import Idle, add

add(
    Idle(
        ("prefix_grouper",),
        lambda config: config.batch.n_samples_per_prompt > 1,
        "a prompt has one answer, which shares it with no other",
        "--n_samples_per_prompt 8",
    ),
    Idle(
        ("prefix_grouper",),
        lambda config: config.dynamic.use_dynamic_batch or config.batch.micro_train_batch_size > 1,
        "a micro-batch of one sample has nothing to share",
        "--micro_train_batch_size 8",
    ),
    Idle(
        ("prefix_grouper",),
        lambda config: not rated(config),
        "the chosen --loss takes answers one by one",
        "--loss dpo",
        (DPOConfig,),
    ),
    Idle(
        ("shuffle_mini_batch",),
        lambda config: optimizer_steps_per_rollout(config.batch) > 1,
        "a rollout is one optimizer step, whose gradient knows no order",
        "--train_batch_size below the samples of a rollout",
    ),
    Idle(
        ("critic_pretrain", "critic_num_nodes", "critic_num_gpus_per_node", "critic_learning_rate", "value_clip",
            "freezing_actor_steps",
        ),
        needs_critic,
        "the chosen --advantage_estimator has no critic",
        "--advantage_estimator gae",
    ),
    Idle(
        ("ref_pretrain", "ref_num_nodes", "ref_num_gpus_per_node"),
        needs_reference,
        "no reference model is loaded with --init_kl_coef 0",
        "--init_kl_coef 0.01",
    ),
    Idle(
        ("ref_num_nodes", "ref_num_gpus_per_node"),
        lambda config: not policy_is_reference(config),
        "the reference is the actor's base with adapters off",
        "--ref_pretrain MODEL for one of its own",
    ),
    Idle(
        ("kl_estimator",),
        needs_reference,
        "there is no KL term with --init_kl_coef 0",
        "--init_kl_coef 0.01",
    ),
    Idle(
        ("kl_target", "use_kl_loss"),
        lambda config: kl_in_reward(config.kl) or kl_in_loss(config.kl),
        "there is no KL term with --init_kl_coef 0",
        "--init_kl_coef 0.01",
    ),
    Idle(
        ("kl_estimator",),
        lambda config: kl_in_reward(config.kl) or config.kl.kl_loss_estimator is None,
        "the KL is in the loss alone, by --kl_loss_estimator",
        "--kl_loss_estimator None",
    ),
    Idle(
        ("kl_loss_coef", "kl_loss_estimator", "add_token_level_kl"),
        lambda config: config.kl.use_kl_loss,
        "the KL term is in the reward, with --init_kl_coef",
        "--use_kl_loss",
    ),
    Idle(
        ("add_token_level_kl",),
        lambda config: config.kl.init_kl_coef > 0,
        "the KL in the reward has the coefficient --init_kl_coef, which is 0",
        "--init_kl_coef 0.01",
    ),
    Idle(
        ("init_kl_coef",),
        lambda config: kl_controller_acts(config.kl) or config.kl.init_kl_coef == 0 or not kl_in_loss(config.kl),
        "--kl_loss_coef fixes the coefficient of the KL loss",
        "--kl_loss_coef None",
    ),
    Idle(
        ("kl_target",),
        lambda config: kl_controller_acts(config.kl) or not kl_in_loss(config.kl),
        "--kl_loss_coef fixes the coefficient of the KL loss",
        "--kl_loss_coef None",
    ),
    Idle(
        ("use_kl_loss", "kl_loss_coef", "kl_loss_estimator"),
        lambda config: config.algorithm.rl_loss_coef > 0 or not kl_in_loss(config.kl),
        "--rl_loss_coef 0 takes the KL loss out with the policy loss",
        "--rl_loss_coef 1",
    ),
    Idle(
        ("kl_full_topk",),
        lambda config: full_kl_top_k(config) is not None,
        "no estimator compares whole distributions",
        "--kl_estimator full",
    ),
    Idle(
        ("log_ref_kl",),
        lambda config: not (kl_in_reward(config.kl) or kl_in_loss(config.kl)),
        "a KL term has the reference loaded, and its KL is logged",
        "--init_kl_coef 0",
    ),
    Idle(
        ("loss_agg_norm_const",),
        lambda config: loss_agg_mode(config) == "seq-mean-token-sum-norm",
        "the chosen --loss_agg_mode does not divide by it",
        "--loss_agg_mode seq-mean-token-sum-norm",
    ),
    Idle(
        ("sft_pos_threshold",),
        lambda config: config.algorithm.sft_loss_coef > 0,
        "there is no supervised term with --sft_loss_coef 0",
        "--sft_loss_coef 0.1",
    ),
    Idle(
        ("kl_horizon",),
        lambda config: config.kl.kl_target is not None,
        "the coefficient is fixed without --kl_target",
        "--kl_target 0.05",
    ),
    Idle(
        ("no_advantage_std_norm",),
        whiten_advantages,
        "advantages are not whitened",
        "--whiten_advantages",
    ),
    Idle(
        ("reward_norm_clip",),
        lambda config: set(reward_norm_scopes(config)) != {"none"},
        "rewards are not normalised",
        "--reward_norm_mean group",
    ),
    Idle(
        ("len_reward_range", "len_reward_type"),
        lambda config: config.shaping.len_reward_coef != 0,
        "length is not rewarded with --len_reward_coef 0",
        "--len_reward_coef 0.1",
    ),
    Idle(
        ("overlong_penalty_factor",),
        lambda config: config.shaping.overlong_buffer_len is not None,
        "there is no penalty without --overlong_buffer_len",
        "--overlong_buffer_len 128",
    ),
    Idle(
        ("format_penalty", "len_reward_coef", "overlong_buffer_len", "stop_properly_penalty_coef", "reward_clip_range"),
        lambda config: "reward_parts" not in estimator(config).needs,
        "the chosen --advantage_estimator reads the parts of the reward, which shaping does not reach",
        "--advantage_estimator group_norm",
    ),
    Idle(
        ("difficulty_key",),
        lambda config: config.shaping.difficulty_loss_weight,
        "difficulty has no weight",
        "--difficulty_loss_weight",
    ),
    Idle(
        (
            "vllm_is_correction_type", "use_icepop", "vllm_is_truncated_threshold", "vllm_is_level",
            "vllm_is_batch_normalize",
        ),
        lambda config: config.correction.enable_vllm_is_correction,
        "rollouts are not corrected",
        "--enable_vllm_is_correction",
    ),
    Idle(
        ("vllm_is_level",),
        lambda config: config.correction.correction_type != "seq-mask-tis",
        "seq-mask-tis weighs tokens and masks sequences",
        "--vllm_is_correction_type tis",
    ),
    Idle(
        (
            "dynamic_filtering_reward_range", "dynamic_filtering_key", "dynamic_filtering_max_batches",
            "dynamic_filtering_shortfall",
        ),
        lambda config: config.filtering.dynamic_filtering,
        "groups are not filtered",
        "--dynamic_filtering",
    ),
    Idle(
        ("min_lr_ratio",),
        lambda config: config.optim.lr_scheduler in FLOORED_SCHEDULES,
        "the chosen --lr_scheduler has no floor",
        f"--lr_scheduler {FLOORED_SCHEDULES[0]}",
        TRAINING,
    ),
    Idle(
        ("lr_warmup_ratio", "lr_warmup_steps"),
        lambda config: config.optim.lr_scheduler != "constant",
        "--lr_scheduler constant has no warm-up",
        "--lr_scheduler constant_with_warmup",
        TRAINING,
    ),
)  # fmt: skip
