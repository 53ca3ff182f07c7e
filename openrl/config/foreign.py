"""Flags that a command does not have, but other commands or OpenRLHF do."""

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
        "every checkpoint resumes with any number of ranks and any ZeRO stage", commands=TRAINING
    ),
    "ref_offload": Foreign(
        "the reference reads all rows before training begins and is then removed",
        commands=(DPOConfig,),
    ),
    "num_cpus_for_local_task": Foreign(
        "rewards and agents run beside the engines and need no CPUs reserved",
        commands=(PPOConfig,),
    ),
    "use_ms": Foreign(
        "models and data come from the Hugging Face Hub or from directories",
        "run `modelscope download` and give the directory",
    ),
    "dataset": Foreign("this command trains on prompts", "--prompt_data", (PPOConfig,)),
    "learning_rate": Foreign(
        "actor and critic have a learning rate each", "--actor_learning_rate", (PPOConfig,)
    ),
    "load_model": Foreign("a model is a directory or a Hub name", "--pretrain DIRECTORY"),
}


@explains_unknown_flags
def flag_of_another(command: type, name: str) -> Problem | None:
    foreign = FOREIGN.get(name.removeprefix("no_"))
    if foreign and command in foreign.commands:
        if foreign.fix:
            return Problem((name,), f"not a flag of this command: {foreign.why}", foreign.fix)
        return Problem((name,), f"ignored: {foreign.why}", fatal=False)
    owners = [
        other
        for other, config in COMMANDS.items()
        if any(name in (spec.name, *spec.alias) for spec in collect_flags(config))
    ]
    message = f"not a flag of this command, but of {', '.join(owners)}"
    return Problem((name,), message, "leave it out") if owners else None
