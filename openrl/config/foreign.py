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


DEAD = Foreign("OpenRLHF reads it nowhere")
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
        "weights travel by vLLM's own weight transfer", commands=(PPOConfig,)
    ),
    "expand_n_samples": Foreign(
        "each answer to a prompt is a request of its own", commands=(PPOConfig,)
    ),
    "use_ds_universal_ckpt": Foreign(
        "a run resumes with the ranks and the ZeRO stage that it was saved with",
        "leave it out; --pretrain of an export starts with any",
        TRAINING,
    ),
    "ref_offload": Foreign(
        "the reference reads all rows before training begins, and is gone by then",
        commands=(DPOConfig,),
    ),
    "num_cpus_for_local_task": Foreign(
        "rewards and agents run beside the engines, and take no place of their own",
        commands=(PPOConfig,),
    ),
    "use_ms": Foreign(
        "models and data come from the Hugging Face Hub or from directories",
        "`modelscope download`, then its directory",
    ),
    "dataset": Foreign("its data are prompts", "--prompt_data", (PPOConfig,)),
    "learning_rate": Foreign("two models learn", "--actor_learning_rate", (PPOConfig,)),
    "load_model": Foreign("models are directories or Hub names", "--pretrain DIRECTORY"),
}


@explains_unknown_flags
def flag_of_another(command: type, name: str) -> Problem | None:
    foreign = FOREIGN.get(name.removeprefix("no_"))
    if foreign and command in foreign.commands:
        if foreign.fix:
            return Problem((name,), f"no flag of this command: {foreign.why}", foreign.fix)
        return Problem((name,), f"ignored: {foreign.why}", fatal=False)
    owners = [
        other
        for other, config in COMMANDS.items()
        if any(name in (spec.name, *spec.alias) for spec in collect_flags(config))
    ]
    message = f"no flag of this command, but of {', '.join(owners)}"
    return Problem((name,), message, "leave it out") if owners else None
