"""Flags that do nothing in the company of others. Asking for one is a problem: it would not do what was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from openrl.config.commands import (
    SUPERVISED,
    TRAINING,
    BatchInferenceConfig,
    DPOConfig,
    EvaluateConfig,
    PPOConfig,
    RMConfig,
    ServeConfig,
    SFTConfig,
)
from openrl.config.derived import (
    FLOORED_SCHEDULES,
    estimator,
    full_kl_top_k,
    kl_controller_acts,
    kl_in_loss,
    kl_in_reward,
    loss_agg_mode,
    model_roles,
    needs_critic,
    needs_reference,
    needs_reward_model,
    optimizer_steps_per_rollout,
    policy_is_reference,
    preference_reference,
    rated,
    reward_norm_scopes,
    source_kinds,
    under_ray,
    whiten_advantages,
)
from openrl.flags.checks import Problem, check

ANSWERING = (BatchInferenceConfig, EvaluateConfig)
ENGINE = (
    "vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "vllm_max_num_seqs", "vllm_max_num_batched_tokens", "vllm_block_size",
    "vllm_max_model_len", "vllm_dtype", "vllm_quantization", "vllm_engine_kwargs", "enforce_eager",
    "enable_prefix_caching",
)  # fmt: skip


@dataclass(frozen=True)
class Idle:
    """``flags`` act only where ``acts(config)``; ``otherwise`` says why not, ``fix`` how they would."""

    flags: tuple[str, ...]
    acts: Callable[[Any], bool]
    otherwise: str
    fix: str
    commands: tuple[type, ...] = (PPOConfig,)

    def __call__(self, config: Any, given: frozenset[str]) -> Iterator[Problem]:
        asked = tuple(name for name in self.flags if name in given)
        if asked and not self.acts(config):
            yield Problem(asked, f"no effect: {self.otherwise}", f"leave it out, or {self.fix}")


IDLE = (
    *(
        Idle(
            (name,),
            lambda config: not config.dynamic.use_dynamic_batch,
            "--use_dynamic_batch cuts micro-batches by tokens",
            "leave --use_dynamic_batch out",
            commands,
        )
        for name, commands in (("micro_train_batch_size", TRAINING), ("micro_rollout_batch_size", (PPOConfig,)))
    ),
    *(
        Idle(
            (name,),
            lambda config: config.dynamic.use_dynamic_batch,
            "micro-batches are cut by samples",
            "--use_dynamic_batch",
            commands,
        )
        for name, commands in (("train_max_tokens_per_gpu", TRAINING), ("rollout_max_tokens_per_gpu", (PPOConfig,)))
    ),
    Idle(
        ("ring_head_stride",),
        lambda config: config.parallel.ring_attn_size > 1,
        "there is no ring",
        "--ring_attn_size 2",
        TRAINING,
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
        ("output_key", "ptx_coef"),
        lambda config: config.ptx.ptx_data is not None,
        "there are no supervised rows without --ptx_data",
        "--ptx_data FILE",
    ),
    Idle(
        ("kl_horizon",),
        lambda config: config.kl.kl_target is not None,
        "the coefficient is fixed without --kl_target",
        "--kl_target 0.05",
    ),
    Idle(
        ("reward_num_nodes", "reward_num_gpus_per_node"),
        needs_reward_model,
        "there is no local reward model without --reward_pretrain",
        "--reward_pretrain DIRECTORY",
    ),
    Idle(
        ("value_head_prefix",),
        lambda config: needs_critic(config) or needs_reward_model(config),
        "there is neither a critic nor a reward model",
        "--advantage_estimator gae",
    ),
    Idle(
        ("reward_num_workers", "reward_memory_gb", "reward_func_kwargs"),
        lambda config: bool({"file", "verifier"} & source_kinds(config)),
        "there is neither a reward function nor a verifier",
        "--remote_rm_url FILE.py",
        (PPOConfig, ServeConfig, *ANSWERING),
    ),
    Idle(
        ("reward_timeout",),
        lambda config: bool({"file", "verifier", "http"} & source_kinds(config)),
        "there is neither a reward function nor a server",
        "--remote_rm_url FILE.py",
        (PPOConfig, ServeConfig, *ANSWERING),
    ),
    Idle(
        ("reward_skip_special_tokens",),
        lambda config: bool({"file", "verifier", "http"} & source_kinds(config)),
        "there is neither a reward function nor a server",
        "--remote_rm_url FILE.py",
        (PPOConfig, *ANSWERING),
    ),
    Idle(
        ("reward_max_retries",),
        lambda config: "http" in source_kinds(config),
        "there is no reward server",
        "--remote_rm_url http://127.0.0.1:5000/get_reward",
        (PPOConfig, *ANSWERING),
    ),
    Idle(
        ("normalize_reward",),
        needs_reward_model,
        "there is no reward model without --reward_pretrain",
        "--reward_pretrain DIRECTORY",
    ),
    Idle(
        ("max_reward_failure_rate",),
        lambda config: config.reward.reward_failure_policy != "fail",
        "with --reward_failure_policy fail the first failure stops the run",
        "--reward_failure_policy drop",
    ),
    Idle(
        (
            "eval_split", "eval_steps", "eval_before_train", "eval_n_samples_per_prompt", "eval_temperature",
            "eval_max_samples", "eval_top_p", "eval_top_k", "eval_generate_max_len", "eval_batch_size", "eval_only",
        ),
        lambda config: config.evaluation.eval_dataset is not None,
        "nothing is evaluated without --eval_dataset",
        "--eval_dataset FILE",
    ),
    Idle(
        ENGINE,
        lambda config: config.engine.rollout_backend == "vllm",
        "it is vLLM's, and --rollout_backend is hf",
        "--rollout_backend vllm",
        (PPOConfig, EvaluateConfig),
    ),
    Idle(
        (
            "vllm_load_format", "vllm_pipeline_parallel_size", "vllm_data_parallel_size", "vllm_enable_expert_parallel",
        ),
        lambda config: config.engine.rollout_backend == "vllm",
        "it is vLLM's, and --rollout_backend is hf",
        "--rollout_backend vllm",
    ),
    Idle(
        ENGINE,
        lambda config: config.task.eval_task == "generate_vllm",
        "it is vLLM's, and --eval_task is another",
        "--eval_task generate_vllm",
        (BatchInferenceConfig,),
    ),
    Idle(
        ("vllm_sleep_level",),
        lambda config: config.hybrid.vllm_enable_sleep and config.engine.rollout_backend == "vllm",
        "no engine of vLLM sleeps",
        "--vllm_enable_sleep",
    ),
    Idle(
        ("deepspeed_sleep_states",),
        lambda config: config.hybrid.deepspeed_enable_sleep,
        "no trained model sleeps",
        "--deepspeed_enable_sleep",
    ),
    Idle(
        ("ref_reward_offload",),
        lambda config: not {"reference", "reward"}.isdisjoint(model_roles(config)),
        "this run has neither a reference model of its own nor a reward model",
        "--init_kl_coef 0.01",
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
        (
            "gradient_checkpointing_method", "gradient_checkpointing_num_layers",
            "gradient_checkpointing_use_reentrant",
        ),
        lambda config: config.deepspeed.gradient_checkpointing,
        "nothing is recomputed without --gradient_checkpointing",
        "--gradient_checkpointing",
        TRAINING,
    ),
    Idle(
        ("ema_beta",),
        lambda config: config.checkpoint.enable_ema,
        "there is no moving average without --enable_ema",
        "--enable_ema",
    ),
    Idle(
        ("save_value_network",),
        needs_critic,
        "the chosen --advantage_estimator has no critic",
        "--advantage_estimator gae",
    ),
    Idle(
        ("best_metric_key",),
        lambda config: config.evaluation.eval_steps > 0,
        "nothing is evaluated on the way",
        "--eval_dataset FILE --eval_steps 10",
    ),
    Idle(
        ("load_optim", "load_rng"),
        lambda config: config.checkpoint.load_checkpoint or config.checkpoint.resume_from_checkpoint is not None,
        "this run resumes from nothing",
        "--load_checkpoint",
        TRAINING,
    ),
    Idle(
        ("tokenizer_chat_template", "chat_template_kwargs", "system_prompt"),
        lambda config: config.templates.apply_chat_template,
        "prompts are plain text without --apply_chat_template",
        "--apply_chat_template",
        (*TRAINING, *ANSWERING),
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
    Idle(
        ("wandb_project",),
        lambda config: config.logging.use_wandb,
        "Weights & Biases is off",
        "--use_wandb",
        TRAINING,
    ),
    Idle(
        ("eval_split", "eval_steps"),
        lambda config: config.evaluation.eval_dataset is not None,
        "nothing is evaluated without --eval_dataset",
        "--eval_dataset FILE",
        SUPERVISED,
    ),
    Idle(
        ("rpc_timeout", "placement_timeout"),
        lambda config: under_ray(config.ranks),
        "without --num_gpus_per_node there is no Ray",
        "--num_gpus_per_node 1",
        SUPERVISED,
    ),
    Idle(
        ("local_rank",),
        lambda config: not under_ray(config.ranks),
        "under Ray no launcher counts ranks",
        "leave --num_gpus_per_node out",
        SUPERVISED,
    ),
    Idle(
        ("input_template", "apply_chat_template"),
        lambda config: not config.data.pretrain_mode,
        "--pretrain_mode learns plain text as it is",
        "leave --pretrain_mode out",
        (SFTConfig,),
    ),
    Idle(
        ("input_template",),
        lambda config: not config.data.multiturn,
        "--multiturn learns dialogues as they are",
        "leave --multiturn out",
        (SFTConfig,),
    ),
    Idle(
        ("compute_fp32_loss",),
        lambda config: config.model.param_dtype != "fp32",
        "everything is in fp32",
        "--param_dtype bf16",
        (RMConfig,),
    ),
    Idle(
        ("ref_pretrain",),
        lambda config: preference_reference(config) is not None,
        "the chosen --loss has no reference",
        "--loss dpo",
        (DPOConfig,),
    ),
    Idle(
        ("nll_loss_coef", "rejected_key"),
        lambda config: not rated(config),
        "rated answers are neither chosen nor rejected",
        "--loss dpo",
        (DPOConfig,),
    ),
)  # fmt: skip

for row in IDLE:
    check(*row.commands)(row)
