"""OpenRLHF: its flags, metrics and agent files.

    AgentInstance   reset(states), step(states) -> {"rewards", "environment_feedback", "done",
                    "scores"?, "extra_logs"?, "sampling_params"?, "environment_images"?}, whose
                    texts are concatenated as they are
    AgentExecutor   execute(prompt, label, ...), which asks an engine for tokens

Its executors may name the AgentInstance that they would play."""

from functools import partial
from pathlib import Path
from typing import Any

from openrl.agents.interfaces import AgentInterface
from openrl.compat.shared.classes import class_of_runner, has_base
from openrl.config.importing.tables import ConfigTable
from openrl.extension_points import agent_interfaces, config_tables, metric_names, stand_ins
from openrl.processes.interfaces import Signature, parameters

COMMANDS = (
    *("train_ppo_ray", "train_sft", "train_rm", "train_dpo", "serve_rm", "batch_inference"),
    "lora_combiner",
)
# of train_ppo, which had everything on each GPU of one machine and no engine: its places and other
# defaults, and of the engine's memory what its hybrid scripts give
ONE_MACHINE = {
    **dict.fromkeys(("colocate_all_models", "vllm_enable_sleep", "deepspeed_enable_sleep"), "true"),
    "lambd": "0.95",
    "value_clip": "0.2",
    "rollout_batch_size": "512",
    "micro_train_batch_size": "4",
    "micro_rollout_batch_size": "8",
    "vllm_gpu_memory_utilization": "0.5",
}
config_tables.add(
    "OpenRLHF",
    ConfigTable(
        Path(__file__).with_name("keys.tsv"),
        marks={
            **{f"openrlhf.cli.{name}": name for name in COMMANDS},
            **{f"{name}.py": name for name in COMMANDS},
            "openrlhf.cli.train_ppo": "train_ppo_ray",
            "openrlhf.cli.train_kd": "train_sft",
            "openrlhf.cli.train_kto": "train_dpo",
        },
        implied={
            "openrlhf.cli.train_kto": {"loss": "kto"},
            "openrlhf.cli.train_ppo": ONE_MACHINE,
        },
        as_flags=True,
    ),
)

metric_names.add(
    "OpenRLHF",
    {
        "train/policy_loss": "actor/policy_loss",
        "train/ppo_kl": "actor/ppo_kl",
        "train/ppo_clip_ratio": "actor/clip_fraction",
        "train/kl": "actor/kl",
        "train/actor_lr": "actor/lr",
        "train/critic_loss": "critic/value_loss",
        "train/critic_lr": "critic/lr",
        "train/values": "critic/value",
        "train/reward": "rollout/reward",
        "train/return": "rollout/return",
        "train/response_length": "rollout/response_length",
        "train/truncated": "rollout/truncated_share",
    },
)

HOME = "openrl.compat.openrlhf.stand_ins"
stand_ins.add("OpenRLHF", {"openrlhf.utils.agent": HOME, "openrlhf.utils.logging_utils": HOME})

EXECUTE = ("prompt", "label", "sampling_params", "max_length", "hf_tokenizer", "llm_engine")


def executes(made: Any) -> bool:
    """Whether ``execute`` is its own. That of a base class plays what the class names."""
    return made.execute.__module__ == made.__module__


def takes_states(made: Any) -> bool:
    if has_base(made, "openrlhf", "AgentInstanceBase"):
        return True
    first = [*parameters(made.step)][1:2]
    return first != [] and first[0] in ("states", "state", "state_dict")


agent_interfaces.add(
    "openrlhf_executor",
    AgentInterface(
        f"OpenRLHF's AgentExecutor: async execute({', '.join(EXECUTE)}[, images])",
        "openrl.compat.openrlhf.executor:ExecutorAdapter",
        "openrl.compat.openrlhf.executor_agent:play_executor",
        {"execute": (Signature(1, EXECUTE), Signature(1, (*EXECUTE, "images")))},
        known_by=executes,
        main_classes=("AgentExecutor",),
        plays_alone=True,
        builds_rows=True,
    ),
)
agent_interfaces.add(
    "openrlhf_instance",
    AgentInterface(
        "OpenRLHF's AgentInstance: async reset(states), async step(states)",
        "openrl.compat.openrlhf.instance:adapt",
        "openrl.compat.shared.raw_text_agent:play_raw_text",
        {"reset": (Signature(2),), "step": (Signature(2),)},
        known_by=takes_states,
        main_classes=("AgentInstance",),
        named_by=partial(class_of_runner, runner="AgentExecutor", attribute="agent_instance_cls"),
    ),
)
