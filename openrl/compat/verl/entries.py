"""verl: its names of algorithms, flags and metrics, and its rows. EasyR1 shares most of them."""

from openrl.extension_points import (
    advantage_estimators,
    flag_names,
    metric_names,
    policy_losses,
    row_shapes,
)
from openrl.flags.elsewhere import FlagNames, MissingFlag

advantage_estimators.add_names(
    "verl",
    {
        "reinforce_plus_plus": "reinforce",
        "reinforce_plus_plus_baseline": "reinforce_baseline",
        "grpo_vectorized": "grpo",
        "rloo_vectorized": "rloo",
    },
)
policy_losses.add_names("verl", {"vanilla": "ppo"})

flag_names.add(
    "verl",
    FlagNames(
        meaning={
            "path": "pretrain",
            "train_files": "prompt_data",
            "val_files": "eval_dataset",
            "prompt_key": "input_key",
            "n": "n_samples_per_prompt",
            "max_assistant_turns": "max_turns",
            "max_user_turns": "max_turns",
            "tool_config_path": "tools",
            "max_response_length": "generate_max_len",
            "total_epochs": "num_episodes",
            "adv_estimator": "advantage_estimator",
            "kl_coef": "init_kl_coef",
            "kl_loss_coef": "init_kl_coef",
            "nnodes": "actor_num_nodes",
            "n_gpus_per_node": "actor_num_gpus_per_node",
        },
        missing={
            "ppo_mini_batch_size": MissingFlag(
                "it counts prompts", "--train_batch_size, in samples"
            )
        },
    ),
)

metric_names.add(
    "verl",
    {
        "actor/pg_loss": "actor/policy_loss",
        "actor/pg_clipfrac": "actor/clip_fraction",
        "actor/pg_clipfrac_lower": "actor/dual_clip_fraction",
        "actor/kl_coef": "kl_coef",
        "critic/score/mean": "rollout/reward",
        "critic/score/max": "rollout/reward_max",
        "critic/score/min": "rollout/reward_min",
        "critic/vf_loss": "critic/value_loss",
        "critic/values/mean": "critic/value",
        "critic/returns/mean": "rollout/return",
        "prompt_length/mean": "rollout/prompt_length",
        "response_length/mean": "rollout/response_length",
        "response_length/max": "rollout/response_length_max",
        "response_length/clip_ratio": "rollout/truncated_share",
        "timing_s/gen": "time/rollout",
        "timing_s/step": "time/step",
    },
)

row_shapes.add("verl", [("prompt", "reward_model.ground_truth")])
