"""MindSpeed-RL: its metrics, keys and rows."""

from pathlib import Path

from openrl.config.importing.tables import ConfigTable
from openrl.extension_points import config_tables, metric_names, row_shapes

metric_names.add(
    "MindSpeed-RL",
    {
        "grpo/score/mean": "rollout/reward",
        "grpo/score/max": "rollout/reward_max",
        "grpo/score/min": "rollout/reward_min",
    },
)

row_shapes.add("MindSpeed-RL", [("question", "labels"), ("question", "answer")])

config_tables.add(
    "MindSpeed-RL",
    ConfigTable(
        Path(__file__).with_name("keys.tsv"),
        marks={
            "megatron_training.is_pairwise_dataset": "train_dpo",
            "train_dpo.py": "train_dpo",
            **dict.fromkeys(("train_grpo.py", "train_ppo.py", "train_dapo.py"), "train_ppo_ray"),
            "rl_config.": "train_ppo_ray",
        },
    ),
)
