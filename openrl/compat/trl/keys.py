"""TRL's keys that several flags of ours share, or the other way round.

A GRPO run there generates ``steps_per_generation`` micro-batches on each process, then takes
``num_iterations`` passes over them in optimizer steps of ``gradient_accumulation_steps``
micro-batches; steps are optimizer steps.

A PPO run there, or one of RLOO before 0.22, takes the answers of ``num_mini_batches`` such steps,
one to each prompt or ``rloo_k``, and learns from them ``num_ppo_epochs`` times; its steps are
rollouts, as ours are."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from openrl.compat.shared.keys import trackers
from openrl.config.importing.convert import Computed, GivenKeys

RL, DPO = "train_ppo_ray", "train_dpo"
AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "cispo": "token-mean",
    "sapo": "seq-mean-token-mean",
    "vespo": "token-mean",
    "luspo": "seq-mean-token-sum",
}
PREFERENCES = {"sigmoid": "dpo", "ipo": "ipo", "kto": "kto", "orpo": "orpo"}
MISMATCH = {
    "token_truncate": ("tis", "token"),
    "token_mask": ("icepop", "token"),
    "sequence_truncate": ("tis", "sequence"),
    "sequence_mask": ("icepop", "sequence"),
}
RANKS = ("num_processes", "nproc_per_node")
# defaults there that differ by command
LEARNING_RATES = {"train_sft": 2e-5, "train_rm": 1e-4}
REWARDS = {
    **dict.fromkeys(("accuracy_reward", "reasoning_accuracy_reward", "accuracy"), "math_verify"),
    "format": "format",  # this, accuracy and tag_count are open-r1's
    "tag_count": "tag_count",
}


def together(keys: GivenKeys, command: str) -> Iterator[Computed]:
    yield from batches(keys, command)
    yield from steps(keys, command)
    if is_rloo(keys):
        yield from rloo(keys)
    elif is_on_policy(keys):
        yield from critic(keys)
    else:
        yield from taught(keys, command) if teacher_key(keys) else loss(keys, command)
    yield from adapters(keys)
    yield from running(keys, command)
    yield from trackers(keys, "report_to")
    if command == RL:
        if not teacher_key(keys) and not is_on_policy(keys):
            yield from rewards(keys)
            if not is_rloo(keys):
                yield from mismatch(keys)
        yield from engines(keys)


def processes(keys: GivenKeys) -> int:
    """Of all machines, by accelerate or torchrun."""
    each = keys.whole("nproc_per_node", 1) * keys.whole("num_machines", 1)
    return keys.whole("num_processes") or each


def accumulated(keys: GivenKeys) -> int:
    return keys.whole("gradient_accumulation_steps", 1)


def batches(keys: GivenKeys, command: str) -> Iterator[Computed]:
    micro, ranks, more = (
        keys.whole("per_device_train_batch_size"),
        processes(keys),
        accumulated(keys),
    )
    size = "per_device_train_batch_size"
    yield Computed("micro_train_batch_size", micro, (size,))
    note = f"{micro} per device x {ranks} processes x {more}"
    parts = ("gradient_accumulation_steps", size, *RANKS)
    yield Computed("train_batch_size", micro * ranks * more, parts, note)
    machines = keys.whole("num_machines", 1)
    yield Computed("num_gpus_per_node", max(1, ranks // machines), RANKS)
    yield Computed("num_nodes", machines, ("num_machines",))
    if command != RL:
        return
    yield Computed("actor_num_gpus_per_node", max(1, ranks // machines), RANKS)
    yield Computed("actor_num_nodes", machines, ("num_machines",))
    if is_on_policy(keys):
        yield from episodes(keys, micro * ranks * more)
        return
    yield Computed("micro_rollout_batch_size", micro, (size,))
    generated = generation(keys)
    of = 1 if teacher_key(keys) else keys.whole("num_generations", 1)
    note = f"{generated} completions / {of} of each prompt"
    written = (
        "steps_per_generation",
        "generation_batch_size",
        size,
        *RANKS,
        "num_generations",
    )
    yield Computed("rollout_batch_size", max(1, generated // of), written, note)


def is_on_policy(keys: GivenKeys) -> bool:
    """Whether these are of PPOConfig or of RLOOConfig before 0.22, which always have this key,
    given or implied."""
    return keys.given("num_ppo_epochs")


def is_rloo(keys: GivenKeys) -> bool:
    return keys.given("rloo_k") or keys.given("normalize_advantages")


def episodes(keys: GivenKeys, step: int) -> Iterator[Computed]:
    """Prompts of a rollout, whose answers are optimizer steps of ``step``, and of the run."""
    rounds, of = keys.whole("num_mini_batches", 1), keys.whole("rloo_k", 1)
    answers = max(1, step * rounds)
    note = f"{rounds} optimizer steps of {step} answers, {of} to each prompt"
    written = ("num_mini_batches", "rloo_k")
    yield Computed("rollout_batch_size", max(1, answers // of), written, note)
    if keys.given("total_episodes"):
        count = keys.whole("total_episodes")
        note = f"{count} answers in rollouts of {answers}"
        yield Computed("max_steps", math.ceil(count / answers), ("total_episodes",), note)
        note = "rows are taken again until --max_steps"
        yield Computed("num_episodes", max(1, count), ("total_episodes",), note)


def critic(keys: GivenKeys) -> Iterator[Computed]:
    """PPO's loss, with a critic that begins as the reward model and learns with the actor."""
    ppo = ("num_ppo_epochs",)
    yield Computed("advantage_estimator", "gae", ppo)
    yield Computed("n_samples_per_prompt", 1, ppo)
    yield Computed("enable_vllm_is_correction", False, ppo)
    yield Computed("critic_pretrain", keys.text("reward_model_path"), ("reward_model_path",))
    note = "one optimizer for both there"
    yield Computed("critic_learning_rate", keys.number("learning_rate"), ("learning_rate",), note)


def rloo(keys: GivenKeys) -> Iterator[Computed]:
    """One ratio and one advantage for each answer; the KL of the whole answer is part of the reward
    that siblings are compared by."""
    old = is_on_policy(keys)
    named = ("rloo_k" if old else "normalize_advantages",)
    yield Computed("advantage_estimator", "rloo", named)
    yield Computed("policy_loss_type", "sequence_ppo", named)
    yield Computed("loss_agg_mode", "seq-mean-token-mean", named)
    yield Computed("enable_vllm_is_correction", False, named)
    weight = "kl_coef" if old else "beta"
    if not old:
        yield Computed("init_kl_coef", keys.number(weight), (weight,))
        yield from clips(keys)
    if keys.number(weight):
        note = "each token's from its own reward; there the answer's sum, which siblings share"
        yield Computed("kl_estimator", "k1", (weight,), note, "differs")


def clips(keys: GivenKeys) -> Iterator[Computed]:
    low = keys.number("epsilon")
    high = keys.number("epsilon_high", low)
    yield Computed("eps_clip_low_high", [str(low), str(high)], ("epsilon", "epsilon_high"))


def generation(keys: GivenKeys) -> int:
    """Return how many completions a generation has."""
    each = keys.whole("steps_per_generation") or accumulated(keys)
    size = keys.whole("per_device_train_batch_size") * processes(keys) * each
    return keys.whole("generation_batch_size") or size


def steps(keys: GivenKeys, command: str) -> Iterator[Computed]:
    """Optimizer steps there; a step of train_ppo_ray is a rollout and all learnt from it."""
    each = keys.whole("steps_per_generation") or accumulated(keys)
    per_rollout = max(1, each // accumulated(keys)) * keys.whole("num_iterations", 1)
    per_rollout = per_rollout if command == RL else 1
    note = f"{per_rollout} optimizer steps in each of ours" if per_rollout > 1 else ""
    for key in ("max_steps", "logging_steps", "save_steps", "eval_steps"):
        strategy = keys.text(key.replace("steps", "strategy"))
        if not keys.given(key) and key != "logging_steps":
            if strategy == "no" or strategy == "false":
                yield Computed(key, -1, (key.replace("steps", "strategy"),))
            continue
        count = keys.number(key)
        written = (
            -1 if count < 0 or strategy in ("no", "false") else max(1, round(count / per_rollout))
        )
        yield Computed(key, written, (key,), note)


def loss(keys: GivenKeys, command: str) -> Iterator[Computed]:
    kind = keys.text("loss_type")
    if command != RL:
        if command == DPO and kind:
            yield Computed("loss", PREFERENCES.get(kind, kind), ("loss_type",))
        if keys.given("beta"):
            yield Computed("beta", keys.number("beta"), ("beta",))
        return
    kind = kind or "dapo"  # the default there
    level = keys.text("importance_sampling_level")
    gspo = {"sequence": "gspo", "sequence_token": "gspo_token"}.get(level, "ppo")
    policy = kind if kind in ("cispo", "sapo", "vespo", "luspo") else gspo
    yield Computed("policy_loss_type", policy, ("importance_sampling_level", "loss_type"))
    yield Computed("loss_agg_mode", AGGREGATIONS.get(kind, kind), ("loss_type",))
    if kind == "dr_grpo":
        width = keys.whole("max_completion_length")
        yield Computed("loss_agg_norm_const", width, ("loss_type", "max_completion_length"))
    if policy == "vespo":
        for flag in ("vespo_pos", "vespo_neg"):
            names = (flag.replace("_", "_k_"), flag.replace("_", "_lambda_"))
            yield Computed(flag, [str(keys.number(name)) for name in names], names)
    elif policy == "cispo":  # its epsilon_high caps the ratio itself, and nothing bounds it below
        cap = keys.number("epsilon_high", keys.number("epsilon"))
        yield Computed("eps_clip_low_high", ["1.0", str(max(cap - 1, 0.0))], ("epsilon_high",))
    elif policy != "sapo":
        yield from clips(keys)
    if keys.on("use_adaptive_entropy"):
        for flag in ("entropy_target", "entropy_coef_delta"):
            yield Computed(flag, keys.number(flag), (flag, "use_adaptive_entropy"))
        ends = ("entropy_coef_min", "entropy_coef_max")
        yield Computed("entropy_coef_range", [str(keys.number(end)) for end in ends], ends)
    beta = keys.number("beta")
    yield Computed("init_kl_coef", beta, ("beta",), "" if beta else "no reference is loaded")
    if beta:
        yield Computed("use_kl_loss", True, ("beta",))
        yield Computed("kl_estimator", "k3", ("beta",))
    parts = keys.text("multi_objective_aggregation") == "normalize_then_sum"
    named = ("multi_objective_aggregation",)
    yield Computed("advantage_estimator", "gdpo" if parts else "group_norm", named)
    scale = keys.text("scale_rewards")
    if scale in ("false", "none", "null"):
        yield Computed("no_advantage_std_norm", True, ("scale_rewards",))


def teacher_key(keys: GivenKeys) -> str:
    """Return the key that names a teacher, or an empty text."""
    names = ("teacher_model_name_or_path", "trainer.teacher_model")
    return next((name for name in names if keys.given(name)), "")


def taught(keys: GivenKeys, command: str) -> Iterator[Computed]:
    """Distillation: beta lies between KL(teacher, student) at 0 and KL(student, teacher) at 1."""
    teacher = teacher_key(keys)
    yield Computed("teacher_pretrain", keys.text(teacher), (teacher,))
    beta = keys.number("beta") if keys.given("beta") else 1.0 if command == RL else 0.5
    even = beta in (0.0, 0.5, 1.0)
    mode = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    note = "" if even else f"with halves of both; there with {beta:g} of the teacher"
    yield Computed(
        "teacher_mode", mode, ("beta", teacher), note, "converted" if even else "differs"
    )
    yield Computed("teacher_topk", 0, (teacher,), "the whole vocabulary")
    if command == RL:
        yield Computed("init_kl_coef", 0.0, (teacher,), "no reference is loaded")
        yield Computed("advantage_estimator", "reinforce", (teacher,), "there is no reward")
        yield Computed("n_samples_per_prompt", 1, (teacher,))
        yield Computed("enable_vllm_is_correction", False, (teacher,))
        return
    yield Computed("sft_loss_coef", 0.0, (teacher,), "the teacher alone")
    share = keys.number("lmbda") if keys.given("lmbda") else 0.5
    if share:
        note = f"here all answers are the data's; {share:g} of the batches have the student's there"
        yield Computed("teacher_mode", None, ("lmbda", teacher), note, "differs")


def adapters(keys: GivenKeys) -> Iterator[Computed]:
    called = any(key.partition(".")[0] == "lora" for key in keys.values)
    if not called and not keys.on("use_peft"):
        return
    names = ("lora.r", "lora.lora_alpha", "lora.lora_dropout", "lora.target_modules")
    if not called:
        names = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
    rank, alpha, dropout, modules = names
    yield Computed("lora_rank", keys.whole(rank, 8), (rank, "use_peft"))
    yield Computed("lora_alpha", keys.whole(alpha, 8), (alpha,))
    yield Computed("lora_dropout", keys.number(dropout), (dropout,))
    if left := keys.items("lora.exclude_modules"):
        yield Computed("lora_exclude_modules", "|".join(left), ("lora.exclude_modules",))
    if wanted := keys.items(modules):
        yield Computed(
            "target_modules", wanted[0] if wanted == ["all-linear"] else wanted, (modules,)
        )


def rewards(keys: GivenKeys) -> Iterator[Computed]:
    """Functions of TRL's scripts by their names."""
    named = keys.items("reward_funcs")
    if found := [REWARDS[name] for name in named if name in REWARDS]:
        others = [name for name in named if name not in REWARDS]
        note = (
            f"without {', '.join(others)}: --remote_rm_url FILE.py:FUNCTION"
            if others
            else "by the verifiers here"
        )
        yield Computed("reward_funcs", found, ("reward_funcs",), note, "differs")
        yield Computed("label_key", "solution", ("reward_funcs",), "the column that they read")
    elif named:
        note = "--remote_rm_url FILE.py:FUNCTION with the same function"
        yield Computed("reward_funcs", None, ("reward_funcs",), note, "none")


def mismatch(keys: GivenKeys) -> Iterator[Computed]:
    mask = "off_policy_mask_threshold"
    if keys.given(mask):
        yield Computed("rollout_rs", ["seq_mean_opsm"], (mask,))
        yield Computed("rollout_rs_threshold", [str(keys.number(mask))], (mask,))
    prefix = "vllm_importance_sampling_"
    if keys.raw(f"{prefix}correction") is not None and not keys.on(f"{prefix}correction"):
        return
    mode = keys.text(f"{prefix}mode")
    kind, level = MISMATCH.get(mode, (mode, "token"))
    yield Computed("vllm_is_correction_type", kind, (f"{prefix}mode",))
    yield Computed("vllm_is_level", level, (f"{prefix}mode",))
    cap = f"{prefix}cap" if keys.given(f"{prefix}cap") else f"{prefix}clip_max"
    ends = [str(keys.number(f"{prefix}clip_min")), str(keys.number(cap))]
    yield Computed("vllm_is_truncated_threshold", ends, (cap, f"{prefix}clip_min"))


def engines(keys: GivenKeys) -> Iterator[Computed]:
    if keys.text("vllm_mode") == "server":
        return
    yield Computed("colocate_all_models", True, ("vllm_mode",), "training and engines take turns")
    size = keys.whole("vllm_tensor_parallel_size", 1)
    yield Computed("vllm_num_engines", max(1, processes(keys) // size), ("vllm_mode", *RANKS))
    if keys.on("vllm_enable_sleep_mode"):
        yield Computed("vllm_enable_sleep", True, ("vllm_enable_sleep_mode",))


def running(keys: GivenKeys, command: str) -> Iterator[Computed]:
    rate = "actor_learning_rate" if command == RL else "learning_rate"
    otherwise = LEARNING_RATES.get(command, 1e-6)
    yield Computed(rate, keys.number("learning_rate", otherwise), ("learning_rate",))
    if name := keys.text("dataset_name"):
        subset = keys.text("dataset_config")
        name = f"{name}@{subset}" if subset else name
        flag = "prompt_data" if command == RL else "dataset"
        yield Computed(flag, name, ("dataset_name", "dataset_config"))
    if command == RL:
        column = keys.text("dataset_prompt_column") or "prompt"  # of open-r1
        yield Computed("input_key", column, ("dataset_prompt_column", "dataset_name"))
        chats = not is_on_policy(keys)
        note = "where prompts are chats" if chats else "scripts of PPO have prompts of text"
        yield Computed("apply_chat_template", chats, ("dataset_name",), note)
    warm = "warmup_ratio" if keys.given("warmup_ratio") else "warmup_steps"
    count = keys.number(warm)
    if count >= 1:
        yield Computed("lr_warmup_steps", int(count), (warm,))
    else:
        yield Computed("lr_warmup_ratio", count, (warm,), "a share of the steps")
    for key, part, flag in (
        ("lr_scheduler_kwargs", "min_lr_rate", "min_lr_ratio"),
        ("gradient_checkpointing_kwargs", "use_reentrant", "gradient_checkpointing_use_reentrant"),
    ):
        if isinstance(given := keys.raw(key), Mapping) and part in given:
            yield Computed(flag, given[part], (key,))
    betas = [str(keys.number("adam_beta1")), str(keys.number("adam_beta2"))]
    yield Computed("adam_betas", betas, ("adam_beta1", "adam_beta2"))
    if path := keys.text("output_dir"):
        yield Computed("save_path", path, ("output_dir",))
        yield Computed("ckpt_path", f"{path}/ckpt", ("output_dir",))
    for key in ("deepspeed", "deepspeed_config"):  # a file, known by the stage in its name
        if found := re.search(r"(?:zero|stage|z)_?([0-3])", keys.text(key).lower()):
            note = "by its name; --ds_config_overrides takes others of its settings"
            yield Computed("zero_stage", int(found[1]), (key,), note, "differs")
    if keys.given("missing_eos_penalty"):
        lower = -abs(keys.number("missing_eos_penalty"))
        note = "becomes the reward of a truncated answer instead of being subtracted"
        yield Computed(
            "stop_properly_penalty_coef", lower, ("missing_eos_penalty",), note, "differs"
        )
