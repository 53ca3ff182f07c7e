"""Flags of engines, memory, checkpoints and trackers that do nothing in the company of others."""

from __future__ import annotations

from openrl.config.commands import (
    SUPERVISED,
    TRAINING,
    BatchInferenceConfig,
    EvaluateConfig,
    PPOConfig,
)
from openrl.config.derived import (
    model_roles,
    needs_critic,
    under_ray,
)
from openrl.config.rules.idle import Idle, add

ENGINE = (
    "vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "vllm_max_num_seqs", "vllm_max_num_batched_tokens", "vllm_block_size",
    "vllm_max_model_len", "vllm_dtype", "vllm_quantization", "vllm_engine_kwargs", "enforce_eager",
    "enable_prefix_caching",
)  # fmt: skip

add(
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
        ENGINE,
        lambda config: config.engine.rollout_backend == "vllm",
        "it is vLLM's, and --rollout_backend is hf",
        "--rollout_backend vllm",
        (PPOConfig, EvaluateConfig),
    ),
    Idle(
        (
            "vllm_load_format", "vllm_pipeline_parallel_size", "vllm_data_parallel_size", "vllm_enable_expert_parallel",
            "vllm_sync_backend",
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
        ("vllm_max_num_seqs", "enable_prefix_caching"),
        lambda config: not config.debug.full_determinism,
        "--full_determinism runs each request alone and shares no prefix",
        "leave --full_determinism out",
        (PPOConfig, EvaluateConfig, BatchInferenceConfig),
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
        ("load_optim", "load_rng"),
        lambda config: config.checkpoint.load_checkpoint or config.checkpoint.resume_from_checkpoint is not None,
        "this run resumes from nothing",
        "--load_checkpoint",
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
)  # fmt: skip
