"""TRL: its flags, metrics, reward functions and environment classes.

``reward_func(completions, **kwargs)`` takes lists and returns a list of numbers. Completions are
passed without special tokens. None says that the function does not apply to a row, and adds nothing
to the sum of its rewards.

Of an environment class ``reset(**row)`` begins an episode, other methods are tools, and there may
be a ``get_reward()``."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openrl.agents.interfaces import AgentInterface
from openrl.config.importing.tables import ConfigTable
from openrl.extension_points import (
    agent_interfaces,
    config_tables,
    metric_names,
    reward_signatures,
)
from openrl.rewards.protocol import Unrated
from openrl.rewards.signatures import RewardSignature

SUPERVISED = {
    **dict.fromkeys(("SFTConfig", "GKDConfig"), "train_sft"),
    "RewardConfig": "train_rm",
    **dict.fromkeys(("DPOConfig", "KTOConfig", "ORPOConfig"), "train_dpo"),
}
# Marks and defaults of PPOConfig (trl/experimental/ppo/ppo_config.py) and of RLOOConfig before
# 0.22, which both have OnPolicyConfig's. Models come first: the policy is loaded from
# sft_model_path, and model_name_or_path names the tokenizer.
PPO = ("ppo.py", "ppo_tldr.py", "PPOConfig", "num_ppo_epochs", "sft_model_path", "response_length")
ON_POLICY_DEFAULTS = {
    **dict.fromkeys(("sft_model_path", "reward_model_path"), "EleutherAI/pythia-160m"),
    "num_ppo_epochs": "4",
    "num_mini_batches": "1",
    "local_rollout_forward_batch_size": "64",
    "response_length": "53",
    "temperature": "0.7",
    "kl_coef": "0.05",
    "cliprange": "0.2",
}
PPO_DEFAULTS = ON_POLICY_DEFAULTS | {
    "learning_rate": "3e-6",
    "cliprange_value": "0.2",
    "gamma": "1.0",
    "lam": "0.95",
}
OLD_RLOO = (
    *("rloo_k", "rloo_tldr.py"),
    *(
        f"{name}+{key}"
        for name in ("rloo.py", "RLOOConfig")
        for key in (*PPO[3:], "total_episodes")
    ),
)
OLD_RLOO_DEFAULTS = ON_POLICY_DEFAULTS | {"learning_rate": "5e-5", "rloo_k": "2"}
RLOO = ("rloo.py", "rloo_vlm.py", "trl rloo", "RLOOConfig", "normalize_advantages")
RLOO_DEFAULTS = {"normalize_advantages": "false", "beta": "0.05", "num_generations": "2"}
RL = ("GRPOConfig", "AsyncGRPOConfig", "DistillationConfig")
SFT = ("sft", "sft_vlm", "sft_gpt_oss", "sft_nemotron_3", "sft_vlm_gemma3", "sft_gemma3")
SCRIPTS = {
    **dict.fromkeys((*SFT, "gkd"), "train_sft"),
    **dict.fromkeys(("reward_modeling", "reward"), "train_rm"),
    **dict.fromkeys(("dpo", "dpo_vlm", "kto", "orpo"), "train_dpo"),
}
RL_SCRIPTS = (
    *("grpo", "grpo_agent", "grpo_vlm", "grpo_2048", "gspo", "gspo_vlm", "async_grpo"),
    *("grpo_trainer", "grpo_continuous_batching", "distillation"),
)
# keys of which a file tells the command
OF_RL = ("num_generations", "reward_funcs", "max_completion_length")
OF_SFT = ("packing", "dataset_text_field", "assistant_only_loss", "completion_only_loss")
OTHERS = (
    *("gold", "sdft", "sdpo", "ssd", "cpo", "bco", "tpo"),
    *("mpo_vlm", "online_dpo", "online_dpo_vlm", "nash_md", "xpo", "prm"),
)

config_tables.add(
    "TRL",
    ConfigTable(
        Path(__file__).with_name("keys.tsv"),
        marks={
            **dict.fromkeys((*OLD_RLOO, *RLOO, *PPO), "train_ppo_ray"),
            **SUPERVISED,
            **dict.fromkeys(RL, "train_ppo_ray"),
            **{f"{name}.py": command for name, command in SCRIPTS.items()},
            **{f"trl {name}": command for name, command in SCRIPTS.items()},
            **{f"{name}.py": "train_ppo_ray" for name in RL_SCRIPTS},
            "trl grpo": "train_ppo_ray",
            **dict.fromkeys((f"{name}.py" for name in OTHERS), ""),
            **dict.fromkeys(OF_RL, "train_ppo_ray"),
            **dict.fromkeys(OF_SFT, "train_sft"),
            "center_rewards_coefficient": "train_rm",
            "precompute_ref_log_probs": "train_dpo",
        },
        refused={
            **dict.fromkeys(
                ("gold.py", "sdft.py", "sdpo.py"),
                "python -m openrl.cli.train_ppo_ray --teacher_pretrain MODEL or --teacher_self",
            ),
            "cpo.py": "python -m openrl.cli.train_dpo --loss simpo",
        },
        implied=dict.fromkeys(OLD_RLOO, OLD_RLOO_DEFAULTS)
        | dict.fromkeys(RLOO, RLOO_DEFAULTS)
        | dict.fromkeys(PPO, PPO_DEFAULTS)
        | {
            mark: {"loss_type": kind}
            for kind in ("kto", "orpo")
            for mark in (f"{kind}.py", f"trl {kind}", f"{kind.upper()}Config")
        },
        calls={
            **dict.fromkeys((*RL, *SUPERVISED, "PPOConfig", "RLOOConfig"), ""),
            "LoraConfig": "lora.",
            "BitsAndBytesConfig": "quantization_config.",
            **dict.fromkeys(("GRPOTrainer", "RLOOTrainer", "GKDTrainer"), "trainer."),
            "DistillationTrainer": "trainer.",
        },
        launcher={
            **{key: key for key in ("config_file", "num_processes", "num_machines")},
            **{key: key for key in ("mixed_precision", "nproc_per_node")},
            "nnodes": "num_machines",
            "zero_stage": "deepspeed_config.zero_stage",
        },
        negation="no_",
    ),
)


metric_names.add(
    "TRL",
    {
        "reward": "rollout/reward",
        "frac_reward_zero_std": "rollout/zero_variance_groups",
        "kl": "actor/kl",
        "entropy": "actor/entropy",
        "clip_ratio/region_mean": "actor/clip_fraction",
        "completions/mean_length": "rollout/response_length",
        "completions/max_length": "rollout/response_length_max",
        "completions/clipped_ratio": "rollout/truncated_share",
        "sampling/sampling_logp_difference/mean": "actor/logprob_gap",
        "sampling/sampling_logp_difference/max": "actor/logprob_gap_max",
    },
)


def without_nulls(values: Any) -> Any:
    """Return rewards with marks for None, and a part that counts these rows."""
    if not isinstance(values, list):
        return values
    left_out = [value is None for value in values]
    rewards = [Unrated.ROW if value is None else value for value in values]
    return {"rewards": rewards, "extra_logs": {"not_applicable": list(map(float, left_out))}}


COLUMNS = {
    "completions": "texts",
    "prompts": "prompts",
    "completion_ids": "token_ids",
    **dict.fromkeys(("ground_truth", "answer", "solution"), "labels"),
}

reward_signatures.add(
    "TRL",
    [
        RewardSignature(
            "reward_func(completions, **kwargs)",
            COLUMNS,
            tuple(COLUMNS),
            without_nulls,
            takes_data=True,
        )
    ],
)


def is_environment(made: type) -> bool:
    """Whether a class has ``reset``, other methods as tools, and either
    ``get_reward()``, or ``reset(**row)`` and only documented tools. Classes with ``step`` but
    without ``get_reward`` are gym's."""
    methods = dict(inspect.getmembers(made, inspect.isfunction))
    tools = tool_methods(made)
    if "reset" not in methods or not tools:
        return False
    if "get_reward" in methods:
        return True
    row = inspect.signature(methods["reset"]).parameters.values()
    takes_rows = any(parameter.kind is parameter.VAR_KEYWORD for parameter in row)
    return "step" not in methods and takes_rows and all(map(inspect.getdoc, tools))


def tool_methods(made: type) -> list[Callable[..., Any]]:
    """Return the methods of a class of TRL that are tools."""
    return [
        method
        for name, method in inspect.getmembers(made, inspect.isfunction)
        if name not in ("reset", "get_reward") and not name.startswith("_")
    ]


agent_interfaces.add(
    "trl",
    AgentInterface(
        "TRL's environment: reset(**row), methods as tools, perhaps get_reward()",
        "openrl.compat.trl.environments:ToolAdapter",
        "openrl.compat.trl.agent:play_tools",
        known_by=is_environment,
        rank=0,
    ),
)
