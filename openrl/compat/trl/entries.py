"""TRL: its flags, reward functions and environment classes.

``reward_func(completions, **kwargs)`` takes lists and returns a list of numbers. Completions are
passed without special tokens. None says that the function does not apply to a row, and adds nothing
to the sum of its rewards.

Of an environment class ``reset(**row)`` begins an episode, other methods are tools, and there may
be a ``get_reward()``."""

import inspect
from collections.abc import Callable
from typing import Any

from openrl.agents.interfaces import AgentInterface
from openrl.extension_points import agent_interfaces, flag_names, reward_signatures
from openrl.flags.elsewhere import FlagNames, MissingFlag
from openrl.rewards.signatures import RewardSignature

DEEPSPEED = MissingFlag(
    "most of DeepSpeed's settings have flags of their own",
    "--zero_stage and the like, and --ds_config_overrides for the others",
    ("train_ppo_ray", "train_sft", "train_rm", "train_dpo"),
)

flag_names.add(
    "TRL",
    FlagNames(
        meaning={
            "model_name_or_path": "pretrain",
            "dataset_name": "prompt_data",
            "output_dir": "save_path",
            "num_generations": "n_samples_per_prompt",
            "environment_factory": "agent_func_path",
            "max_prompt_length": "prompt_max_len",
            "max_completion_length": "generate_max_len",
            "max_seq_length": "max_len",
            "per_device_train_batch_size": "micro_train_batch_size",
            "num_train_epochs": "num_episodes",
            "weight_decay": "l2",
            "max_grad_norm": "max_norm",
            "beta": "init_kl_coef",
            "epsilon": "eps_clip",
            "lora_r": "lora_rank",
            "fp16": "param_dtype",
            "torch_dtype": "param_dtype",
            "report_to": "track_with",
        },
        missing={
            "gradient_accumulation_steps": MissingFlag(
                "it follows from --train_batch_size, --micro_train_batch_size and the number of"
                " ranks",
                "leave it out",
                DEEPSPEED.commands,
            ),
            "deepspeed": DEEPSPEED,
            "deepspeed_config": DEEPSPEED,
            "ds_config": DEEPSPEED,
        },
    ),
)


def without_nulls(values: Any) -> Any:
    """Return rewards with 0 for None, and a part that counts these rows."""
    if not isinstance(values, list):
        return values
    left_out = [value is None for value in values]
    rewards = [0.0 if out else value for value, out in zip(values, left_out, strict=True)]
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
        "openrl.agents.files.build:play_tools",
        known_by=is_environment,
        rank=0,
    ),
)
