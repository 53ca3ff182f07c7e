"""verl: its names of algorithms, flags and metrics, its rows, reward functions and tools.

``compute_score(data_source, solution_str, ground_truth, extra_info)`` scores one answer at a time,
coroutine or not. Answers are passed without special tokens. ``extra_info`` is the data's column of
that name, or else all other columns."""

from functools import partial
from typing import Any

from openrl.agents.interfaces import ToolFiles
from openrl.extension_points import (
    advantage_estimators,
    flag_names,
    metric_names,
    policy_losses,
    reward_signatures,
    row_shapes,
    stand_ins,
    tool_files,
)
from openrl.flags.elsewhere import FlagNames, MissingFlag
from openrl.rewards.reward_rows import RewardRows
from openrl.rewards.signatures import Column, RewardSignature, read_dicts

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


def infos(rows: RewardRows) -> list[Any]:
    return [meta.get("extra_info", meta) for meta in rows.metas]


ONE: dict[str, str | Column] = {
    "solution_str": "texts",
    "ground_truth": "labels",
    "data_source": "sources",
    "extra_info": infos,
}
MANY = {f"{name}s": column for name, column in ONE.items()}
LABEL = {"ground_truth": "labels"}
SCORES = partial(read_dicts, reward="score")

reward_signatures.add(
    "verl",
    [
        RewardSignature(
            "compute_score(data_source, solution_str, ground_truth, extra_info)",
            ONE,
            tuple(ONE),
            SCORES,
            by_row=True,
        ),
        RewardSignature("", MANY, tuple(MANY), SCORES),
        RewardSignature("", {"predict_str": "texts"} | LABEL, read=SCORES, by_row=True),
        RewardSignature("", {"model_output": "texts"} | LABEL, read=SCORES, by_row=True),
    ],
)

HOME = "openrl.compat.verl.stand_ins"
stand_ins.add(
    "verl",
    {
        "verl.tools.base_tool": HOME,
        "verl.tools.function_tool": HOME,
        "verl.tools.schemas": HOME,
        "verl.utils.rollout_trace": HOME,
    },
)

tool_files.add(
    "verl",
    ToolFiles(
        (".yaml", ".yml"),
        "verl's FILE.yaml",
        read_file="openrl.compat.verl.tools:read_config",
        read_module="openrl.compat.verl.tools:read_module",
    ),
)
