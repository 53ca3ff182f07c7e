"""Flags that a command does not have, but other commands or other systems do."""

from __future__ import annotations

from dataclasses import dataclass

from openrl.config.commands import COMMANDS, TRAINING, BatchInferenceConfig, DPOConfig, PPOConfig
from openrl.flags.checks import Problem, explains_unknown_flags
from openrl.flags.schema import collect_flags


@dataclass(frozen=True)
class Foreign:
    """Why a command lacks a flag that OpenRLHF or another command has, and what to give instead."""

    why: str
    fix: str = ""  # empty: the flag is ignored with a warning
    commands: tuple[type, ...] = tuple(COMMANDS.values())


DEAD = Foreign("OpenRLHF itself never reads it")
ALONE = Foreign("one process holds the whole model", commands=(BatchInferenceConfig,))

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
        "rewards and agents run beside the engines and need no CPUs reserved",
        commands=(PPOConfig,),
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
    "ppo_mini_batch_size": Foreign("it counts prompts", "--train_batch_size, in samples"),
}

LENGTH = ("generate_max_len", "max_len")
RATE = ("actor_learning_rate", "learning_rate")
ROWS = ("prompt_data", "dataset")
EPOCHS = ("num_episodes", "max_epochs")
KL = ("init_kl_coef",)
MODEL = ("pretrain", "model_path", "reward_pretrain")
NAMES = {
    "model_name_or_path": MODEL,
    "model": MODEL,
    "model_path": MODEL,
    "base_model": MODEL,
    "path": MODEL,
    "adapter": ("lora_path", "lora_adapter_path"),
    "data": ROWS,
    "dataset": ROWS,
    "dataset_name": ROWS,
    "prompt_data": ROWS,
    "train_files": ROWS,
    "input_file": ROWS,
    "val_files": ("eval_dataset",),
    "prompt_key": ("input_key",),
    "output_dir": ("save_path", "output_path"),
    "output_file": ("output_path",),
    "n": ("n_samples_per_prompt",),
    "num_generations": ("n_samples_per_prompt",),
    "num_samples": ("n_samples_per_prompt",),
    "max_prompt_length": ("prompt_max_len",),
    "max_completion_length": LENGTH,
    "max_response_length": LENGTH,
    "max_new_tokens": LENGTH,
    "max_seq_length": ("max_len",),
    "per_device_train_batch_size": ("micro_train_batch_size",),
    "num_train_epochs": EPOCHS,
    "total_epochs": EPOCHS,
    "lr": RATE,
    "weight_decay": ("l2",),
    "max_grad_norm": ("max_norm",),
    "kl_coef": KL,
    "kl_loss_coef": KL,
    "beta": KL,
    "clip_eps": ("eps_clip",),
    "epsilon": ("eps_clip",),
    "lora_r": ("lora_rank",),
    "report_to": ("track_with",),
    "nnodes": ("actor_num_nodes", "num_nodes"),
    "n_gpus_per_node": ("actor_num_gpus_per_node", "num_gpus_per_node"),
}
"""How TRL, verl or another command of ours calls it, and how we do: the first flag that the command
has."""


@explains_unknown_flags
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
