"""ROLL: its names of algorithms and metrics, its keys, and its rows. It shares most of verl's names
of metrics."""

from pathlib import Path

from openrl.config.importing.tables import ConfigTable
from openrl.extension_points import (
    advantage_estimators,
    config_tables,
    metric_names,
    policy_losses,
    row_shapes,
)

advantage_estimators.add_names("ROLL", {"agentic_reinforce": "turn_reinforce"})
policy_losses.add_names("ROLL", {"vanilla": "gpg"})

metric_names.add("ROLL", {"actor/ppo_ratio_clipfrac": "actor/clip_fraction"})

row_shapes.add("ROLL", [("messages", "ground_truth", "tag"), ("prompt", "ground_truth", "tag")])

ROLLOUTS = ("start_rlvr_rollout_pipeline.py", "start_agentic_rollout_pipeline.py")
RL = ("rlvr", "rlvr_vl", "agentic", "onpolicy_distill")
config_tables.add(
    "ROLL",
    ConfigTable(
        Path(__file__).with_name("keys.tsv"),
        marks={
            **dict.fromkeys(ROLLOUTS, ""),
            **{f"start_{name}_pipeline.py": "train_ppo_ray" for name in RL},
            **{
                f"start_{name}_pipeline.py": "train_sft"
                for name in ("sft", "distill", "distill_vl")
            },
            "start_dpo_pipeline.py": "train_dpo",
            "sft_train.": "train_sft",
            "chosen_key": "train_dpo",
            "actor_infer.": "train_ppo_ray",
        },
        refused=dict.fromkeys(ROLLOUTS, "python -m openrl.cli.evaluate --help"),
        renamed={
            "student": "sft_train",
            "student_train": "actor_train",
            "student_infer": "actor_infer",
        },
        together="openrl.compat.roll.keys:together",
    ),
)
