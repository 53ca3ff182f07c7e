"""ROLL's keys that several flags of ours share, or the other way round.

An optimizer step there is per_device_train_batch_size x gradient_accumulation_steps samples on each
data-parallel rank; the ranks are the GPUs of device_mapping over the sizes that divide a model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from openrl.config.importing.formulas import Computed, GivenKeys

RL = "train_ppo_ray"
TRAIN, INFER, ENVIRONMENTS = "actor_train.", "actor_infer.", "train_env_manager."
SPLITS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
GAMES = {"sokoban": "sokoban", "frozenlake": "frozen_lake", "countdown": "countdown"}
VERIFIERS = {
    "MathRule": "math_verify",
    "CodeSandbox": "code",
    "LLMJudge": "judge",
    "CrossThinkQA": "choice",
}


def together(keys: GivenKeys, command: str) -> Iterator[Computed]:
    trained = "sft_train." if command == "train_sft" else TRAIN
    yield from batches(keys, command, trained)
    yield from evaluation(keys)
    others = [key for key in keys.below("system_envs") if "MODELSCOPE" not in key]
    if others:
        pairs = [f"{key.partition('.')[2]}={keys.raw(key)}" for key in others]
        yield Computed("system_envs", pairs, tuple(others))
    if command == RL:
        yield from places(keys)
        yield from teachers(keys)
        yield from environments(keys)
        yield from rewards(keys)
    else:
        gpus = devices(keys, trained)
        yield Computed("num_gpus_per_node", len(gpus) or 1, (f"{trained}device_mapping",))


def devices(keys: GivenKeys, role: str) -> list[int]:
    """Return the GPUs of ``list(range(0,8))``, sums of such lists, or ``[0, 1]``; nothing runs."""
    text = str(keys.raw(f"{role}device_mapping") or "")
    found: list[int] = []
    for start, stop in re.findall(r"range\(\s*(?:(\d+)\s*,)?\s*(\d+)\s*\)", text):
        found += range(int(start or 0), int(stop))
    return found or [int(n) for n in re.findall(r"\d+", text)]


def teacher_models(keys: GivenKeys) -> dict[str, str]:
    """Key of a teacher's model -> the tags whose rows it teaches; none for all."""
    ends = ".model_args.model_name_or_path"
    found = [key for key in keys.values if key.startswith("teacher.") and key.endswith(ends)]
    return {key: key.removesuffix(ends) + ".tag_included" for key in found}


def is_taught_alone(keys: GivenKeys) -> bool:
    """Whether rewards come from the teacher only: on-policy distillation without ``use_opd``."""
    return bool(teacher_models(keys)) and not keys.on("use_opd")


def teachers(keys: GivenKeys) -> Iterator[Computed]:
    """The KL to the teacher is the reward of each token there, with gamma 0."""
    models = teacher_models(keys)
    if len(models) == 1:
        (model,) = models
        yield Computed("teacher_pretrain", keys.text(model), (model, "use_opd"))
        coefficient = f"{model.partition('.model_args')[0]}.opd_kl_coef"
        yield Computed("teacher_coef", keys.number(coefficient, 1.0), (coefficient,))
    elif models:
        rows = [(tag, keys.text(key)) for key, tags in models.items() for tag in keys.items(tags)]
        file = ", ".join(f"{tag}: {{{model}: 1}}" for tag, model in rows)
        note = f"--teacher_routing FILE.yaml that says {file}"
        yield Computed("teacher_pretrain", None, (*models, *models.values()), note, "none")
    if is_taught_alone(keys):
        yield Computed("advantage_estimator", "reinforce", ("adv_estimator",), "always so there")


def is_agentic(keys: GivenKeys) -> bool:
    return any(key.startswith(ENVIRONMENTS) for key in keys.values)


def batches(keys: GivenKeys, command: str, role: str) -> Iterator[Computed]:
    config = f"{role}strategy_args.strategy_config."
    divided = math.prod(keys.whole(f"{config}{size}", 1) for size in SPLITS)
    divided *= keys.whole(f"{role}model_args.ulysses_size", 1)
    gpus = len(devices(keys, role)) or 1
    ranks = max(1, gpus // divided)
    names = [
        f"{role}training_args.{n}"
        for n in ("gradient_accumulation_steps", "per_device_train_batch_size")
    ]
    more, each = (keys.whole(name, 1) for name in names)
    size, note = each * more * ranks, f"{each} per device x {more} x {ranks} ranks"
    prompts = keys.whole("rollout_batch_size")
    played = prompts * (1 if is_agentic(keys) else keys.whole("num_return_sequences_in_group", 1))
    if command == RL and 0 < played < size:
        size, note = played, f"{note}, but a rollout has {played} samples"
    yield Computed("train_batch_size", size, (*names, f"{role}device_mapping"), note)
    if command != RL:
        return
    group = f"{ENVIRONMENTS}group_size"
    if is_agentic(keys):
        size = max(1, keys.whole(group, 1))
        note = f"{prompts} trajectories / {size} of each group"
        yield Computed(
            "rollout_batch_size", max(1, prompts // size), ("rollout_batch_size", group), note
        )
        yield Computed("n_samples_per_prompt", size, (group,))
    else:
        yield Computed("rollout_batch_size", prompts, ("rollout_batch_size",))
    extra = "is_use_additional_prompts"
    if keys.on(extra):
        more = keys.whole("max_additional_running_prompts")
        names = ["max_additional_running_prompts", extra, "rollout_batch_size"]
        yield Computed(
            "vllm_generate_batch_size", prompts + more, tuple(names), f"{prompts} + {more}"
        )


def evaluation(keys: GivenKeys) -> Iterator[Computed]:
    lists = [key for key in keys.below("validation") if key.endswith(".file_name")]
    names = [name for key in lists for name in keys.items(key)]
    if names:
        yield Computed("eval_dataset", ",".join(names), tuple(lists))
    every = keys.whole("eval_steps")
    if (names or is_agentic(keys)) and every > 0:
        yield Computed("eval_steps", every, ("eval_steps",))
        yield Computed("eval_before_train", True, ("eval_steps",), "evaluates at step 0 too")


def places(keys: GivenKeys) -> Iterator[Computed]:
    """Roles on the same GPUs take turns; others get the places that the file says."""
    train, infer = devices(keys, TRAIN), devices(keys, INFER)
    mapped = (f"{TRAIN}device_mapping", f"{INFER}device_mapping", "num_gpus_per_node")
    per_worker = keys.whole(f"{INFER}num_gpus_per_worker", 1)
    size = max(
        per_worker, keys.whole(f"{INFER}strategy_args.strategy_config.tensor_parallel_size", 1)
    )
    named = (
        f"{INFER}num_gpus_per_worker",
        f"{INFER}strategy_args.strategy_config.tensor_parallel_size",
    )
    yield Computed("vllm_tensor_parallel_size", size, named)
    if not train or not infer:
        return
    if train == infer:
        per_node = min(len(train), keys.whole("num_gpus_per_node", 8))
        yield Computed("actor_num_gpus_per_node", per_node, mapped[::-1])
        yield Computed("actor_num_nodes", max(1, len(train) // per_node), mapped)
        yield Computed("colocate_all_models", True, mapped)
        yield Computed(
            "vllm_num_engines",
            max(1, len(infer) // size),
            (mapped[1], *named),
            f"{len(infer)} GPUs / {size}",
        )
    else:
        written = {"actor": train, "vllm": infer}
        in_reward = keys.on("add_token_level_kl") and keys.number("init_kl_coef") > 0
        if in_reward or (keys.on("use_kl_loss") and keys.number("kl_loss_coef") > 0):
            written["ref"] = devices(keys, "reference.") or train
        if keys.text("adv_estimator") in ("", "gae"):
            written["critic"] = devices(keys, "critic.") or train
        numbers = sorted({gpu for gpus in written.values() for gpu in gpus})  # without gaps here
        written = {role: [numbers.index(gpu) for gpu in gpus] for role, gpus in written.items()}
        text = ";".join(f"{role}={spans(gpus)}" for role, gpus in written.items())
        yield Computed("placement", text, mapped)
    if {*train} & {*infer} and not keys.number("async_generation_ratio"):
        yield Computed("vllm_enable_sleep", True, mapped, "engines sleep while training runs")
        level = f"{INFER}strategy_args.strategy_config.sleep_level"
        if keys.given(level):
            yield Computed("vllm_sleep_level", keys.whole(level), (level,))
        yield Computed("deepspeed_enable_sleep", True, mapped, "training sleeps while engines run")
        stays = keys.on(f"{TRAIN}strategy_args.strategy_config.offload_policy")
        parts = ["grad"] if stays else ["param", "optim", "grad"]
        yield Computed("deepspeed_sleep_states", parts, mapped)


def spans(gpus: list[int]) -> str:
    whole = gpus == list(range(gpus[0], gpus[-1] + 1))
    return f"{gpus[0]}-{gpus[-1]}" if whole and len(gpus) > 1 else ",".join(map(str, gpus))


def environments(keys: GivenKeys) -> Iterator[Computed]:
    tags = keys.items(f"{ENVIRONMENTS}tags")
    known = {
        tag: next((here for part, here in GAMES.items() if part in tag.lower()), tag)
        for tag in tags
    }
    if known:
        yield Computed("env_tags", list(dict.fromkeys(known.values())), (f"{ENVIRONMENTS}tags",))


def rewards(keys: GivenKeys) -> Iterator[Computed]:
    """Rule workers that have a verifier here, by the names of their classes."""
    if is_taught_alone(keys):
        return
    workers = {
        key: next((here for there, here in VERIFIERS.items() if there in str(keys.raw(key))), "")
        for key in keys.values
        if key.startswith("rewards.") and key.endswith(".worker_cls")
    }
    if found := {key: here for key, here in workers.items() if here}:
        note = "each scores all rows; --reward_routing FILE says which tags"
        yield Computed("reward_funcs", list(dict.fromkeys(found.values())), tuple(found), note)
    for key in (key for key, here in workers.items() if not here):
        note = "no verifier here does this: --remote_rm_url FILE.py:FUNCTION that does"
        note += "; without it the other rewards score its rows" if found else ""
        yield Computed("remote_rm_url", None, (key,), note, "none")
