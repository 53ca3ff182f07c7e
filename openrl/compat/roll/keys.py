"""ROLL's keys that several flags of ours share, or the other way round.

An optimizer step there is per_device_train_batch_size x gradient_accumulation_steps samples on each
data-parallel rank; the ranks are the GPUs of device_mapping over the sizes that divide a model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from openrl.compat.shared.keys import TRACKERS, scheduler
from openrl.config.importing.convert import Computed, GivenKeys

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
SCOPES = {
    "state": "group",
    "traj_group_id": "group",
    "tags": "datasource",
    "inductive": "datasource",
}


def together(keys: GivenKeys, command: str) -> Iterator[Computed]:
    trained = "sft_train." if command == "train_sft" else TRAIN
    yield from batches(keys, command, trained)
    yield from training(keys, trained)
    yield from data(keys, command, trained)
    yield from trackers(keys)
    if command == RL:
        yield from places(keys)
        yield from teachers(keys)
        yield from kl(keys)
        yield from clips(keys)
        yield from normalisation(keys)
        yield from environments(keys)
        yield from rollouts(keys)
        yield from rewards(keys)
    else:
        gpus = devices(keys, trained)
        yield Computed("num_gpus_per_node", len(gpus) or 1, (f"{trained}device_mapping",))
    if command == "train_sft" and keys.given("teacher_pretrain"):
        weight = keys.number("distill_loss_weight", 0.5)
        yield Computed("teacher_coef", weight, ("distill_loss_weight", "teacher_pretrain"))
        answers = round(1 - weight, 6)
        yield Computed("sft_loss_coef", answers, ("distill_loss_weight", "teacher_pretrain"))


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


def training(keys: GivenKeys, role: str) -> Iterator[Computed]:
    args = f"{role}training_args."
    kind, ratio, steps = (
        f"{args}{n}" for n in ("lr_scheduler_type", "warmup_ratio", "warmup_steps")
    )
    yield from scheduler(keys, kind, ratio, steps)
    lora = f"{role}model_args.lora_"
    if keys.whole(f"{lora}rank") and (targets := keys.items(f"{lora}target")):
        yield Computed("target_modules", targets, (f"{lora}target",))
    resume = keys.text("resume_from_checkpoint")
    if resume == "true":
        yield Computed("load_checkpoint", True, ("resume_from_checkpoint",))
    elif resume not in ("", "false"):
        yield Computed("resume_from_checkpoint", resume, ("resume_from_checkpoint",))


def data(keys: GivenKeys, command: str, role: str) -> Iterator[Computed]:
    key = f"{role}data_args.file_name"
    if files := keys.items(key):
        flag = "prompt_data" if command == RL else "dataset"
        yield Computed(flag, ",".join(files), (key,))
        yield Computed("label_key", "ground_truth", (key,), "the label of ROLL's rows")
        yield Computed("datasource_key", "tag", (key,), "the source of ROLL's rows")
    template = f"{role}data_args.template"
    if keys.given(template) or keys.given("global_template"):
        named = (template, "global_template")
        yield Computed("apply_chat_template", True, named, "the tokenizer's own template")
    lists = [k for k in keys.values if re.fullmatch(r"validation\.\w+\.file_name", k)]
    names = [name for k in lists for name in keys.items(k)]
    if names:
        yield Computed("eval_dataset", ",".join(names), tuple(lists))
    every = keys.whole("eval_steps")
    if (names or is_agentic(keys)) and every > 0:
        yield Computed("eval_steps", every, ("eval_steps",))
        yield Computed("eval_before_train", True, ("eval_steps",), "evaluates at step 0 too")


def trackers(keys: GivenKeys) -> Iterator[Computed]:
    kind, directory = keys.text("track_with"), keys.text("tracker_kwargs.log_dir")
    if kind == "tensorboard":
        named = ("track_with", "tracker_kwargs.log_dir")
        yield Computed("use_tensorboard", directory or "./runs/tensorboard", named)
    elif kind == "wandb":
        yield Computed("use_wandb", True, ("track_with",), "the key comes from WANDB_API_KEY")
    elif kind in TRACKERS:
        yield Computed("track_with", [kind], ("track_with",))
    others = [
        k for k in keys.values if re.fullmatch(r"system_envs\.\w+", k) and "MODELSCOPE" not in k
    ]
    if others:
        pairs = [f"{k.partition('.')[2]}={keys.raw(k)}" for k in others]
        yield Computed("system_envs", pairs, tuple(others))


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
        if uses_kl(keys):
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


def uses_kl(keys: GivenKeys) -> bool:
    in_reward = keys.on("add_token_level_kl") and keys.number("init_kl_coef") > 0
    return in_reward or (keys.on("use_kl_loss") and keys.number("kl_loss_coef") > 0)


def kl(keys: GivenKeys) -> Iterator[Computed]:
    """Two coefficients: init_kl_coef acts only with add_token_level_kl, the loss takes k3."""
    in_loss, in_reward = keys.on("use_kl_loss"), keys.on("add_token_level_kl")
    if in_loss and in_reward:
        yield Computed("init_kl_coef", keys.number("init_kl_coef"), ("init_kl_coef",))
        yield Computed("kl_loss_coef", keys.number("kl_loss_coef"), ("kl_loss_coef",))
        yield Computed("add_token_level_kl", True, ("add_token_level_kl",))
        yield Computed("kl_loss_estimator", "k3", ("use_kl_loss",), "always k3 there")
    elif in_loss:
        yield Computed("init_kl_coef", keys.number("kl_loss_coef"), ("kl_loss_coef", "use_kl_loss"))
        yield Computed("kl_estimator", "k3", ("use_kl_loss", "kl_penalty"), "always k3 there")
    elif in_reward:
        yield Computed("init_kl_coef", keys.number("init_kl_coef"), ("init_kl_coef",))
    else:
        named = ("add_token_level_kl", "use_kl_loss", "init_kl_coef", "kl_loss_coef")
        yield Computed("init_kl_coef", 0.0, named, "neither in the loss nor in the reward")
        return
    if in_loss:
        yield Computed("use_kl_loss", True, ("use_kl_loss",))
    if in_reward:
        name = keys.text("kl_penalty")
        yield Computed("kl_estimator", {"kl": "k1", "mse": "k2"}.get(name, name), ("kl_penalty",))
        if keys.given("target_kl"):
            yield Computed("kl_target", keys.number("target_kl"), ("target_kl",))
            yield Computed("kl_horizon", keys.whole("kl_horizon"), ("kl_horizon",))


def clips(keys: GivenKeys) -> Iterator[Computed]:
    if keys.on("use_pg_clip_range"):
        named = ("pg_clip_low", "pg_clip_high", "use_pg_clip_range")
        yield Computed("eps_clip_low_high", [str(keys.number(k)) for k in named[:2]], named)
    if keys.number("reward_clip"):
        most = keys.number("reward_clip")
        yield Computed("reward_clip_range", [str(-most), str(most)], ("reward_clip",))
        yield Computed("token_reward_clip", most, ("reward_clip",), "again after the KL")
    if keys.text("adv_estimator") in ("", "gae") and keys.given("lambd"):
        yield Computed("lambd", keys.number("lambd"), ("lambd",))
    estimator = keys.text("adv_estimator")
    gamma = {
        "gigpo": "gigpo_gamma",
        "step_reinforce": "turn_gamma",
        "agentic_reinforce": "turn_gamma",
    }
    if estimator in gamma and keys.given("step_reward_gamma"):
        yield Computed(gamma[estimator], keys.number("step_reward_gamma"), ("step_reward_gamma",))
    if estimator in ("step_reinforce", "gigpo"):
        yield Computed("agent_sample_unit", "step", ("adv_estimator",), "a row for each turn")
    if estimator == "gigpo":
        for flag in ("episode", "step"):
            if keys.given(f"{flag}_reward_weight"):
                key = f"{flag}_reward_weight"
                yield Computed(f"gigpo_{flag}_weight", keys.number(key), (key,))
    if keys.on("difficulty_mask"):
        ends = [f"difficulty_{end}_threshold" for end in ("low", "high")]
        yield Computed("dynamic_filtering", True, ("difficulty_mask",))
        yield Computed(
            "dynamic_filtering_reward_range", [str(keys.number(k)) for k in ends], tuple(ends)
        )
        rounds = "a mask there: groups outside are not generated again"
        yield Computed("dynamic_filtering_max_batches", 1, ("difficulty_mask",), rounds)
    bound = "train_infer_correction.is_weight.upper_bound"
    if keys.given(bound):
        yield Computed("vllm_is_truncated_threshold", ["0.0", str(keys.number(bound))], (bound,))


def normalisation(keys: GivenKeys) -> Iterator[Computed]:
    prefix = "reward_normalization."
    if keys.text("adv_estimator") == "gigpo":  # which has its own
        return
    if not any(key.startswith(prefix) for key in keys.values):
        return
    grouping, method = keys.text(f"{prefix}grouping"), keys.text(f"{prefix}method") or "identity"
    scope = SCOPES.get(grouping, grouping)
    mean = "none" if method == "identity" else scope
    std = "none" if method in ("identity", "mean") else scope
    named = (f"{prefix}method", f"{prefix}grouping")
    mean = keys.text(f"{prefix}norm_mean_type") or mean
    std = keys.text(f"{prefix}norm_std_type") or std
    yield Computed("reward_norm_mean", mean, (*named, f"{prefix}norm_mean_type"))
    yield Computed("reward_norm_std", std, (*named, f"{prefix}norm_std_type"))
    if method == "asym_clip":
        yield Computed("reward_norm_clip", ["-1.0", "3.0"], (f"{prefix}method",))


def environments(keys: GivenKeys) -> Iterator[Computed]:
    tags = keys.items(f"{ENVIRONMENTS}tags")
    known = {
        tag: next((here for part, here in GAMES.items() if part in tag.lower()), tag)
        for tag in tags
    }
    if known:
        yield Computed("env_tags", list(dict.fromkeys(known.values())), (f"{ENVIRONMENTS}tags",))


def rollouts(keys: GivenKeys) -> Iterator[Computed]:
    ratio = "async_generation_ratio"
    if keys.number(ratio) > 0:
        yield Computed("async_train", True, (ratio,))
        yield Computed(
            "max_staleness", math.ceil(keys.number(ratio)), (ratio,), "rounded up, as there"
        )
    key = f"{INFER}generating_args.max_new_tokens"
    if is_agentic(keys) and keys.given(key) and not keys.given("max_tokens_per_step"):
        yield Computed("max_tokens_per_turn", keys.whole(key), (key,))
    elif not is_agentic(keys) and keys.given(key) and not keys.given("response_length"):
        yield Computed("generate_max_len", keys.whole(key), (key,))


def rewards(keys: GivenKeys) -> Iterator[Computed]:
    """Rule workers that have a verifier here, by the names of their classes."""
    if is_taught_alone(keys):
        return
    found = {
        key: here
        for key in keys.values
        if key.startswith("rewards.") and key.endswith(".worker_cls")
        for there, here in VERIFIERS.items()
        if there in str(keys.raw(key))
    }
    if found:
        note = "each scores all rows; --reward_routing FILE says which tags"
        yield Computed("reward_funcs", list(dict.fromkeys(found.values())), tuple(found), note)
