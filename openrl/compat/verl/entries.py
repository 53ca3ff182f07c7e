"""verl: its names of algorithms, flags and metrics, its rows, reward functions and tools.

``compute_score(data_source, solution_str, ground_truth, extra_info)`` scores one answer at a time,
coroutine or not. Answers are passed without special tokens. ``extra_info`` is the data's column of
that name, or else all other columns."""

from functools import partial
from pathlib import Path
from typing import Any

from openrl.agents.interfaces import ToolFiles
from openrl.compat.shared.reward_dicts import read_dicts
from openrl.config.importing.tables import ConfigTable
from openrl.extension_points import (
    advantage_estimators,
    config_tables,
    metric_names,
    policy_losses,
    reward_signatures,
    row_shapes,
    stand_ins,
    tool_files,
)
from openrl.rewards.reward_rows import RewardRows
from openrl.rewards.signatures import Column, RewardSignature

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

OTHERS = ("main_eval", "main_generation", "main_generation_server")
config_tables.add(
    "verl",
    ConfigTable(
        Path(__file__).with_name("keys.tsv"),
        marks={
            "verl.trainer.main_ppo": "train_ppo_ray",
            "main_ppo.py": "train_ppo_ray",
            "verl.trainer.main_ppo_sync": "train_ppo_ray",
            "verl.experimental.fully_async_policy.fully_async_main": "train_ppo_ray",
            "verl.experimental.one_step_off_policy.main_ppo": "train_ppo_ray",
            "recipe.dapo.main_dapo": "train_ppo_ray",
            "recipe.dapo.src.main_dapo": "train_ppo_ray",
            "verl.trainer.sft_trainer": "train_sft",
            "verl.trainer.sft_trainer_ray": "train_sft",
            "verl.trainer.fsdp_sft_trainer": "train_sft",
            "optim.": "train_sft",
            **dict.fromkeys((f"verl.trainer.{name}" for name in OTHERS), ""),
        },
        refused=dict.fromkeys(
            (f"verl.trainer.{name}" for name in OTHERS), "python -m openrl.cli.evaluate --help"
        ),
        together="openrl.compat.verl.keys:together",
        launcher={"nproc_per_node": "trainer.n_gpus_per_node", "nnodes": "trainer.nnodes"},
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
