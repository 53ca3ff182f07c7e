"""ROLL: its names of algorithms and flags, and its rows."""

from openrl.extension_points import advantage_estimators, flag_names, policy_losses, row_shapes
from openrl.flags.elsewhere import FlagNames

advantage_estimators.add_names("ROLL", {"agentic_reinforce": "turn_reinforce"})
policy_losses.add_names("ROLL", {"vanilla": "gpg"})

flag_names.add(
    "ROLL",
    FlagNames(
        meaning={
            "worker_cls": "agent_func_path",
            "group_size": "n_samples_per_prompt",
            "tags": "env_tags",
            "custom_envs": "env_config",
            "num_env_groups": "env_groups",
            "n_groups": "env_groups_per_tag",
            "num_groups_partition": "env_groups_per_tag",
            "max_traj_per_env": "env_max_trajectories",
            "group_size_redundancy": "env_group_redundancy",
            "max_env_step_concurrent": "env_max_concurrency",
            "max_tokens_per_step": "max_tokens_per_turn",
        },
    ),
)

row_shapes.add("ROLL", [("messages", "ground_truth", "tag"), ("prompt", "ground_truth", "tag")])
