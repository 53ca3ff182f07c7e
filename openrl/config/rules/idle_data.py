"""Flags of data, rewards and evaluation that do nothing in the company of others."""

from __future__ import annotations

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
    needs_critic,
    needs_reward_model,
    preference_reference,
    rated,
    source_kinds,
)
from openrl.config.rules.idle import Idle, add

ANSWERING = (BatchInferenceConfig, EvaluateConfig)

add(
    Idle(
        ("output_key", "ptx_coef"),
        lambda config: config.ptx.ptx_data is not None,
        "there are no supervised rows without --ptx_data",
        "--ptx_data FILE",
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
        ("best_metric_key",),
        lambda config: config.evaluation.eval_steps > 0,
        "nothing is evaluated on the way",
        "--eval_dataset FILE --eval_steps 10",
    ),
    Idle(
        ("tokenizer_chat_template", "chat_template_kwargs", "system_prompt"),
        lambda config: config.templates.apply_chat_template,
        "prompts are plain text without --apply_chat_template",
        "--apply_chat_template",
        (*TRAINING, *ANSWERING),
    ),
    Idle(
        ("eval_split", "eval_steps"),
        lambda config: config.evaluation.eval_dataset is not None,
        "nothing is evaluated without --eval_dataset",
        "--eval_dataset FILE",
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
