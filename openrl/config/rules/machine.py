"""Rules about this machine: what must exist, be writable, or be installed; and where metrics go.

They import nothing and use no network. Whether a Hub name exists only shows when it is loaded.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from openrl.config.commands import (
    AnsweringConfig,
    EvaluateConfig,
    MergeConfig,
    PPOConfig,
    ServeConfig,
    SupervisedConfig,
    TrainingConfig,
)
from openrl.config.derived import DATA, given_models, given_names, is_local
from openrl.config.groups.checkpoint import CHECKPOINT_NAME, COMPLETE_CHECKPOINTS
from openrl.config.groups.data import FILE_FORMATS, JINJA_SUFFIXES, data_items, name_and_subset
from openrl.config.groups.placement import has_launcher
from openrl.config.teacher_plan import routed_models
from openrl.extension_points import trackers
from openrl.flags.checks import Problems, check, check_environment, problem, unknown_names, warning
from openrl.flags.dump import value_of
from openrl.flags.schema import collect_flags
from openrl.flags.secrets import LEFT_OUT, secrets_in
from openrl.locks import owner_of, refusal

# what $WANDB_MODE may say
WANDB_SENDING_MODES = ("online", "shared", "run")
WANDB_LOCAL_MODES = ("offline", "disabled", "dryrun")
INSTALL = "pip install 'openrl-trainer[cpu]' or 'openrl-trainer[gpu]'"
OUTPUTS = (
    *("save_path", "ckpt_path", "ckpt_upload_dir", "logging_dir", "use_tensorboard", "wandb_dir"),
    "rollout_dump_dir",
)


# -- what is read ----------------------------------------------------------------------------------


@check_environment
def policy_exists(config: TrainingConfig | AnsweringConfig) -> Problems:
    tokenizer = config.model.tokenizer_path
    files = MODEL_FILES | (TOKENIZER_FILES if tokenizer is None else {})
    yield from model_problems("pretrain", config.model.pretrain, files)
    yield from model_problems("tokenizer_path", tokenizer, TOKENIZER_FILES, "complete tokenizer")


MODEL_FILES = {"config.json": ("config.json",), "weights": ("*.safetensors", "*.bin")}
# transformers makes up an empty tokenizer if these files are missing
TOKENIZER_FILES = {"tokenizer files": ("tokenizer*", "vocab*", "*.model")}


def model_problems(
    flag: str,
    name: str | None,
    files: Mapping[str, tuple[str, ...]] = MODEL_FILES,
    what: str = "complete model",
) -> Problems:
    """Check that a model's directory has each part of ``files``, by one of the part's patterns."""
    if name is None or (name and not is_local(name)):
        return
    directory = Path(name).expanduser()
    if not name or not directory.is_dir():
        message = f"no such directory: {name}" if name else "names no model"
        yield problem((flag,), message, "a model directory, or a Hub name like Qwen/Qwen3-0.6B")
        return
    found = {part for part in files if any(any(directory.glob(p)) for p in files[part])}
    if missing := [part for part in files if part not in found]:
        message = f"{name} is not a {what}; missing: {', '.join(missing)}"
        fix = "a directory that save_pretrained of model and tokenizer wrote"
        yield problem((flag,), message, fix)


@check_environment
def other_models_exist(
    config: TrainingConfig | AnsweringConfig | ServeConfig | MergeConfig,
) -> Problems:
    trains = isinstance(config, TrainingConfig)  # and gives tokens, not texts, to its reward models
    files = MODEL_FILES | ({} if trains else TOKENIZER_FILES)
    for flag, name in given_models(config):
        if flag != "pretrain":  # ``policy_exists`` looks at it
            yield from model_problems(flag, name, files)


@check_environment
def routed_models_are_downloaded(config: PPOConfig) -> Problems:
    away = [name for name in routed_models(config) if not is_local(name)]
    if config.model.use_ms and away:
        message = f"{away[0]} in the file is no directory, and ModelScope gives what flags name"
        fix = "a directory that you have downloaded, in the file"
        yield problem(("teacher_routing", "use_ms"), message, fix)


@check_environment
def adapter_exists(config: TrainingConfig | MergeConfig) -> Problems:
    for flag, name in given_names(config, ("lora_path", "lora_adapter_path")):
        if flag == "lora_adapter_path" and not is_local(name):  # it may be on the Hub
            continue
        directory, files = Path(name).expanduser(), ("adapter_config.json", "adapter_model.*")
        if missing := [file for file in files if not any(directory.glob(file))]:
            message = f"{name} has no {' and no '.join(missing)}"
            yield problem((flag,), message, "a directory that peft saved")


@check_environment
def data_exist(config: TrainingConfig | AnsweringConfig) -> Problems:
    for flag, names in given_names(config, DATA):
        if not data_items(names):
            yield problem((flag,), f"{names!r} names no data", f"--{flag} FILE")
        for item in data_items(names):
            name, _ = name_and_subset(item)
            a_file = is_local(name) or name.endswith(tuple(FILE_FORMATS))
            if a_file and not Path(name).expanduser().exists():
                fix = f"one of *{' *'.join(FILE_FORMATS)}, or a Hub name"
                yield problem((flag,), f"no such file or directory: {name}", fix)


@check_environment
def template_files_exist(config: TrainingConfig | AnsweringConfig) -> Problems:
    for flag in ("input_template", "tokenizer_chat_template"):
        name = getattr(config.templates, flag) or ""
        if name.endswith(JINJA_SUFFIXES) and not Path(name).expanduser().is_file():
            yield problem((flag,), f"no such file: {name}")


# -- what is written -------------------------------------------------------------------------------


@check_environment
def outputs_are_writable(config: TrainingConfig | EvaluateConfig) -> Problems:
    for flag, name in given_names(config, OUTPUTS):
        if flag != "ckpt_upload_dir" or "://" not in name:
            yield from output_problems(flag, name)


def output_problems(flag: str, name: str) -> Problems:
    """Check that a directory exists or can be made, by making one: permissions do not tell all."""
    if not name:
        yield problem((flag,), "names no directory", f"--{flag} ./ckpt")
        return
    directory = Path(name).expanduser().absolute()
    try:
        above = (directory, *directory.parents)
        nearest = next(path for path in above if path.is_symlink() or path.exists())
    except OSError as error:
        yield problem((flag,), f"{name[:60]}...: {error.strerror}", "another path")
        return
    if not nearest.is_dir():
        what = "a file" if nearest.exists() else "a link to nothing"
        yield problem((flag,), f"{nearest} is {what}, not a directory", "another path")
        return
    try:
        tempfile.TemporaryDirectory(prefix=".openrl_", dir=nearest).cleanup()
    except OSError as error:
        yield problem((flag,), f"{nearest} is not writable: {error.strerror}", "another path")


def is_later_rank(config: TrainingConfig) -> bool:
    """Return whether a launcher started this process beside one that begins the run."""
    return has_launcher() and isinstance(config, SupervisedConfig) and os.environ["RANK"] != "0"


@check_environment
def no_other_run_writes_there(config: TrainingConfig) -> Problems:
    if is_later_rank(config):
        return  # rank 0 of this same run has it
    for flag in ("save_path", "ckpt_path"):
        directory = Path(getattr(config.checkpoint, flag)).expanduser()
        if owner := owner_of(directory):
            yield refusal(flag, directory, owner)


@check_environment
def checkpoints_are_not_in_the_way(config: TrainingConfig) -> Problems:
    flags = config.checkpoint
    manifests = Path(flags.ckpt_path).expanduser().glob(COMPLETE_CHECKPOINTS)
    found = sum(CHECKPOINT_NAME.fullmatch(path.parent.name) is not None for path in manifests)
    if found and not (flags.resumes or flags.overwrite_ckpt):
        message = f"{flags.ckpt_path} holds checkpoints of an earlier run ({found})"
        fix = "--load_checkpoint to resume, --overwrite_ckpt to start fresh"
        yield problem(("ckpt_path",), message, fix)


@check_environment
def results_are_not_in_the_way(config: TrainingConfig) -> Problems:
    flags, name = config.checkpoint, config.checkpoint.save_path
    if not name or is_later_rank(config):
        return  # rank 0 of this same run may have begun
    critic = [f"{name}_critic"] if getattr(flags, "save_value_network", False) else []
    directories = [Path(place).expanduser() for place in (name, *critic)]
    # resolve() would raise for a link to itself
    places = {os.path.realpath(directory) for directory in directories}
    used = [
        flag
        for flag, model in given_models(config)
        if is_local(model) and os.path.realpath(Path(model).expanduser()) in places
    ]
    left = [
        str(directory)
        for directory in directories
        if any((directory / file).is_file() for file in ("metrics.jsonl", "config.json"))
    ]
    if used:
        message = "the model would be written over itself"
        yield problem(("save_path", *used), message, "another path")
    elif left and not (flags.resumes or flags.overwrite_ckpt):
        message = f"{left[0]} holds an earlier run or a model, which would be overwritten"
        yield problem(("save_path",), message, "another path, or --overwrite_ckpt")
    elif left and flags.resumes and getattr(config.evaluation, "eval_only", False):
        message = f"{name} holds a run, whose metrics and summary an evaluation alone would replace"
        yield problem(("save_path", "eval_only"), message, "another --save_path")


@check_environment
def the_checkpoint_to_resume_from_is_one(config: TrainingConfig) -> Problems:
    name = config.checkpoint.resume_from_checkpoint
    if name is None:
        return
    path = Path(name).expanduser()
    if not CHECKPOINT_NAME.fullmatch(path.name) or not (path / "manifest.json").is_file():
        message = f"{name} is not a complete checkpoint"
        fix = "a directory step_N with a manifest.json"
        yield problem(("resume_from_checkpoint",), message, fix)


# -- packages --------------------------------------------------------------------------------------


@check_environment
def training_can_run(config: TrainingConfig) -> Problems:
    yield from package_problems((), "deepspeed", INSTALL)
    if isinstance(config, SupervisedConfig):
        if config.ranks.under_ray:
            yield from package_problems(("num_gpus_per_node",), "ray", INSTALL)
        return
    yield from package_problems((), "ray", INSTALL)
    if config.engine.rollout_backend == "vllm" and not config.collecting.replays:
        fix = f"--rollout_backend hf, or {INSTALL}"
        yield from package_problems(("rollout_backend",), "vllm", fix)


@check_environment
def kernels_can_run(config: TrainingConfig) -> Problems:
    if not config.changes.use_liger_kernel:
        return
    if config.device.device == "cpu":
        message = "Liger kernels need a GPU"
        yield problem(("use_liger_kernel", "device"), message, "leave --use_liger_kernel out")
        return
    yield from package_problems(("use_liger_kernel",), "liger_kernel", "pip install liger-kernel")


@check
def a_gpu_has_allocations(config: TrainingConfig) -> Problems:
    if config.debug.profile_tool == "memory" and config.device.device == "cpu":
        message = "memory records GPU allocations only"
        yield problem(("profile_tool", "device"), message, "--profile_tool torch")


@check_environment
def trackers_can_run(config: TrainingConfig) -> Problems:
    known = [name for name in config.logging.trackers if name in trackers.names()]
    for name in known:
        flag = "track_with" if name in config.logging.track_with else f"use_{name}"
        for package in sorted(trackers[name].needs):
            yield from package_problems((flag,), package, f"pip install {package}")


@check_environment
def wandb_can_start(config: TrainingConfig) -> Problems:
    flags = config.logging
    mode = flags.wandb_mode or os.environ.get("WANDB_MODE", "online")
    if "wandb" not in flags.trackers or mode in WANDB_LOCAL_MODES:
        return
    if mode not in WANDB_SENDING_MODES:
        fix = f"unset WANDB_MODE, or one of {', '.join(WANDB_SENDING_MODES + WANDB_LOCAL_MODES)}"
        yield problem(("use_wandb",), f"Weights & Biases has no mode {mode!r} ($WANDB_MODE)", fix)
        return
    stored = [Path(name).expanduser() for name in ("~/.netrc", "~/_netrc")]
    variables = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC")
    known = any(map(os.environ.get, variables))
    if not known and not any(path.is_file() for path in stored):
        fix = "export WANDB_API_KEY, run `wandb login`, or --wandb_mode offline"
        yield problem(("use_wandb",), "Weights & Biases has no key", fix)


def package_problems(flags: tuple[str, ...], package: str, fix: str) -> Problems:
    if find_spec(package) is None:
        yield problem(flags, f"the package {package} is not installed", fix)


# -- metrics and secrets ---------------------------------------------------------------------------


@check
def trackers_are_known(config: TrainingConfig) -> Problems:
    yield from unknown_names("track_with", config.logging.track_with, trackers)


@check
def secrets_are_better_kept_elsewhere(config: TrainingConfig | AnsweringConfig) -> Problems:
    for spec in collect_flags(type(config)):
        for name in secrets_in(value_of(config, spec)) if spec.may_hold_secrets else ():
            message = (
                f"{name} looks like a secret: config.yaml, checkpoints and trackers get"
                f" {LEFT_OUT} in its place"
            )
            url = isinstance(value_of(config, spec), str)
            fix = "" if url else "an environment variable, which workers get too"
            yield warning((spec.name,), message, fix)


@check
def arguments_have_their_tracker(config: TrainingConfig) -> Problems:
    running = config.logging.trackers
    for name, arguments in config.logging.tracker_kwargs.items():
        if name not in running:
            fix = f"--track_with {name}"
            yield problem(("tracker_kwargs",), f"the tracker {name} is not in use", fix)
        elif not isinstance(arguments, dict):
            message = f"the arguments of {name} are not a JSON object"
            yield problem(("tracker_kwargs",), message, f'{{"{name}": {{"tags": ["a"]}}}}')


@check
def environment_is_readable(config: PPOConfig) -> Problems:
    for pair in config.placement.system_envs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            message = f"{name!r} is not of the form NAME=VALUE"
            yield problem(("system_envs",), message, "--system_envs NCCL_DEBUG=WARN")
        elif secret := next(secrets_in({name: value}), None):
            message = (
                f"{secret} looks like a secret, but flags are written to config.yaml,"
                " checkpoints and trackers"
            )
            fix = f"export {name} where this command, or `ray start`, runs"
            yield problem(("system_envs",), message, fix)
