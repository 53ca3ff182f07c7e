"""What to say of a flag that a command does not have, but other commands or other systems do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from openrl.config.commands import COMMANDS
from openrl.config.importing.tables import REFUSE, keys_of
from openrl.errors import UserError
from openrl.extension_points import config_tables
from openrl.flags.checks import EXPLAINERS, problem, warning
from openrl.flags.schema import collect_flags


@dataclass(frozen=True)
class MissingFlag:
    """Why commands lack a flag that others have, and what to give instead."""

    why: str
    fix: str = ""  # empty: the flag is ignored with a warning
    commands: tuple[str, ...] = ()  # names of the commands that lack it; empty: all


@dataclass(frozen=True)
class FlagNames:
    """Flags by the names that somebody may give them."""

    meaning: Mapping[str, str] = field(default_factory=dict)  # name -> the flag here
    missing: Mapping[str, MissingFlag] = field(default_factory=dict)


SAME = {
    "pretrain": ("model_path", "reward_pretrain"),
    "lora_path": ("lora_adapter_path",),
    "prompt_data": ("dataset",),
    "save_path": ("output_path",),
    "generate_max_len": ("max_len",),
    "num_episodes": ("max_epochs",),
    "actor_learning_rate": ("learning_rate",),
    "actor_num_nodes": ("num_nodes",),
    "actor_num_gpus_per_node": ("num_gpus_per_node",),
}
"""Flag -> the flags that mean the same in commands without it."""

OWN = FlagNames(
    meaning={
        **dict.fromkeys(("model", "model_path", "base_model"), "pretrain"),
        **dict.fromkeys(("data", "dataset", "prompt_data", "input_file"), "prompt_data"),
        "output_file": "output_path",
        "adapter": "lora_path",
        "num_samples": "n_samples_per_prompt",
        "agent_path": "agent_func_path",
        "max_new_tokens": "generate_max_len",
        "lr": "actor_learning_rate",
        "clip_eps": "eps_clip",
        "dtype": "param_dtype",
    },
    missing={
        "learning_rate": MissingFlag(
            "actor and critic have a learning rate each",
            "--actor_learning_rate",
            ("train_ppo_ray",),
        ),
        "render_save_dir": MissingFlag(
            "the trace keeps transcripts and frames of episodes; that of evaluate is"
            " --rollout_dump_dir",
            commands=("train_ppo_ray", "evaluate"),
        ),
        "deepspeed": MissingFlag(
            "most of DeepSpeed's settings have flags of their own",
            "--zero_stage and the like, and --ds_config_overrides for the others",
        ),
    },
)
"""Names that one of our commands has and another does not, and names in use everywhere."""


@cache
def known_names() -> FlagNames:
    """Return the names of ours and of all systems: for dotted keys the last part, and of keys that
    share one the flag that most examples mean."""
    meaning: dict[str, str] = {}
    missing: dict[str, MissingFlag] = {}
    rows = [
        (row, entry.component.as_flags or row.how == REFUSE)
        for entry in config_tables.entries()
        for row in keys_of(entry.name).rows
    ]
    for row, explains in sorted(rows, key=lambda found: -found[0].files):
        last = row.key.rpartition(".")[2]
        if row.flags and "*" not in row.key and not last.startswith("no_"):  # a form of ours
            meaning.setdefault(last, row.flags[0].split("|")[0])
        elif explains and "." not in row.key:
            fix = "leave it out" if row.how == REFUSE else ""
            missing.setdefault(row.key, MissingFlag(row.note, fix, row.commands))
    return FlagNames(meaning | dict(OWN.meaning), missing | dict(OWN.missing))


def candidates(name: str) -> tuple[str, ...]:
    """Return the flags that a name may mean, of which a command's first counts."""
    here = known_names().meaning.get(name)
    return (here, *SAME.get(here, ())) if here else ()


def flag_of_another(command: type, name: str) -> UserError | None:
    names = {config: known for known, config in COMMANDS.items()}
    missing = known_names().missing.get(name.removeprefix("no_"))
    if missing and (not missing.commands or names[command] in missing.commands):
        if missing.fix:
            return problem((name,), f"not a flag of this command: {missing.why}", missing.fix)
        return warning((name,), f"ignored: {missing.why}")
    own = {spec.name for spec in collect_flags(command)}
    # names of nested settings have dots; what is said of the critic is not meant for the actor
    last = "" if name.startswith("critic.") else name.rpartition(".")[2]
    if meant := [flag for flag in candidates(last) if flag in own]:
        return problem((name,), "no such flag here", f"--{meant[0]}")
    owners = [
        other
        for other, config in COMMANDS.items()
        if any(name in (spec.name, *spec.alias) for spec in collect_flags(config))
    ]
    message = f"not a flag of this command, but of {', '.join(owners)}"
    if owners:
        return problem((name,), message, "leave it out")
    return _unknown_key(name) if "." in name else None


def _unknown_key(name: str) -> UserError | None:
    """What is nearest to a dotted flag among those of systems whose flags have dots."""
    for entry in config_tables.entries():
        if entry.component.as_flags and (near := keys_of(entry.name).nearest(name)):
            return problem((name,), f"no such flag, and no such key of {entry.name}", f"--{near}")
    return None


EXPLAINERS.append(flag_of_another)
