"""Flags that a command does not have, but other commands or other systems do."""

from __future__ import annotations

from dataclasses import dataclass

from openrl.config.commands import COMMANDS, TRAINING, BatchInferenceConfig, DPOConfig, PPOConfig
from openrl.flags.checks import EXPLAINERS, Problem
from openrl.flags.schema import collect_flags


@dataclass(frozen=True)
class Foreign:
    """Why a command lacks a flag that OpenRLHF or another command has, and what to give instead."""

    why: str
    fix: str = ""  # empty: the flag is ignored with a warning
    commands: tuple[type, ...] = tuple(COMMANDS.values())


DEAD = Foreign("OpenRLHF itself never reads it")
ALONE = Foreign("one process holds the whole model", commands=(BatchInferenceConfig,))

DEEPSPEED = Foreign(
    "most of DeepSpeed's settings have flags of their own",
    "--zero_stage and the like, and --ds_config_overrides for the others",
    TRAINING,
)

FOREIGN = {
    "actor_init_on_gpu": DEAD,
    "perf": DEAD,
    "train_split": DEAD,
    "zero_stage": ALONE,
    "local_rank": ALONE,
    "deepcompile": Foreign("DeepSpeed runs without DeepCompile", commands=TRAINING),
    "dataloader_num_workers": Foreign("rows are tokenised before training", commands=TRAINING),
    "vllm_sync_with_ray": Foreign(
        "vLLM's own weight transfer moves the weights", commands=(PPOConfig,)
    ),
    "expand_n_samples": Foreign(
        "each answer to a prompt is already a separate request", commands=(PPOConfig,)
    ),
    "use_ds_universal_ckpt": Foreign(
        "checkpoints resume with other ranks and ZeRO stages as they are", commands=TRAINING
    ),
    "ref_offload": Foreign(
        "the reference reads all rows before training begins and is then removed",
        commands=(DPOConfig,),
    ),
    "num_cpus_for_local_task": Foreign(
        "rewards and agents run beside the engines and need no CPUs reserved", commands=(PPOConfig,)
    ),
    "learning_rate": Foreign(
        "actor and critic have a learning rate each", "--actor_learning_rate", (PPOConfig,)
    ),
    "load_model": Foreign("a model is a directory or a Hub name", "--pretrain DIRECTORY"),
    "gradient_accumulation_steps": Foreign(
        "it follows from --train_batch_size, --micro_train_batch_size and the number of ranks",
        "leave it out",
        TRAINING,
    ),
    **dict.fromkeys(("deepspeed", "deepspeed_config", "ds_config"), DEEPSPEED),
    "ppo_mini_batch_size": Foreign("it counts prompts", "--train_batch_size, in samples"),
}

SYNONYMS = (
    (("pretrain", "model_path", "reward_pretrain"),
     ("model_name_or_path", "model", "model_path", "base_model", "path")),
    (("lora_path", "lora_adapter_path"), ("adapter",)),
    (("prompt_data", "dataset"),
     ("data", "dataset", "dataset_name", "prompt_data", "train_files", "input_file")),
    (("eval_dataset",), ("val_files",)),
    (("input_key",), ("prompt_key",)),
    (("save_path", "output_path"), ("output_dir",)),
    (("output_path",), ("output_file",)),
    (("n_samples_per_prompt",), ("n", "num_generations", "num_samples", "group_size")),
    (("agent_func_path",), ("worker_cls", "agent_path", "environment_factory")),
    (("env_tags",), ("tags",)),
    (("env_config",), ("custom_envs",)),
    (("env_groups",), ("num_env_groups",)),
    (("env_groups_per_tag",), ("n_groups", "num_groups_partition")),
    (("env_max_trajectories",), ("max_traj_per_env",)),
    (("env_group_redundancy",), ("group_size_redundancy",)),
    (("env_max_concurrency",), ("max_env_step_concurrent",)),
    (("max_turns",), ("max_assistant_turns", "max_user_turns")),
    (("max_tokens_per_turn",), ("max_tokens_per_step",)),
    (("tools",), ("tool_config_path",)),
    (("prompt_max_len",), ("max_prompt_length",)),
    (("generate_max_len", "max_len"),
     ("max_completion_length", "max_response_length", "max_new_tokens")),
    (("max_len",), ("max_seq_length",)),
    (("micro_train_batch_size",), ("per_device_train_batch_size",)),
    (("num_episodes", "max_epochs"), ("num_train_epochs", "total_epochs")),
    (("actor_learning_rate", "learning_rate"), ("lr",)),
    (("l2",), ("weight_decay",)),
    (("max_norm",), ("max_grad_norm",)),
    (("advantage_estimator",), ("adv_estimator",)),
    (("init_kl_coef",), ("kl_coef", "kl_loss_coef", "beta")),
    (("eps_clip",), ("clip_eps", "epsilon")),
    (("lora_rank",), ("lora_r",)),
    (("param_dtype",), ("fp16", "torch_dtype", "dtype")),
    (("track_with",), ("report_to",)),
    (("actor_num_nodes", "num_nodes"), ("nnodes",)),
    (("actor_num_gpus_per_node", "num_gpus_per_node"), ("n_gpus_per_node",)),
)  # fmt: skip
"""Our flags, of which a command's first is meant, and their names in TRL, verl or elsewhere."""

NAMES = {name: ours for ours, names in SYNONYMS for name in names}
"""Name elsewhere -> flags of ours."""


def flag_of_another(command: type, name: str) -> Problem | None:
    foreign = FOREIGN.get(name.removeprefix("no_"))
    if foreign and command in foreign.commands:
        if foreign.fix:
            return Problem((name,), f"not a flag of this command: {foreign.why}", foreign.fix)
        return Problem((name,), f"ignored: {foreign.why}", fatal=False)
    own = {spec.name for spec in collect_flags(command)}
    # verl's names have dots; what it says of the critic is not meant for the actor
    theirs = "" if name.startswith("critic.") else name.rpartition(".")[2]
    if ours := [flag for flag in NAMES.get(theirs, ()) if flag in own]:
        return Problem((name,), "no such flag here", f"--{ours[0]}")
    owners = [
        other
        for other, config in COMMANDS.items()
        if any(name in (spec.name, *spec.alias) for spec in collect_flags(config))
    ]
    message = f"not a flag of this command, but of {', '.join(owners)}"
    return Problem((name,), message, "leave it out") if owners else None


EXPLAINERS.append(flag_of_another)
