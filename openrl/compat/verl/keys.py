"""verl's keys that several flags of ours share, or the other way round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from openrl.compat.shared.keys import (
    KL,
    colocated,
    lowest_rate,
    prompts_of_step,
    scheduler,
    sleeping,
    trackers,
)
from openrl.config.importing.convert import Computed, GivenKeys
from openrl.config.importing.values import put

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
REF, MODEL = "actor_rollout_ref.ref.", "actor_rollout_ref.model."
DISTILLS, LOSS = "distillation.enabled", "distillation.distillation_loss."
TEACHER = "distillation.teacher_model"
RL = "train_ppo_ray"
# its own scores by data source, told by the names of files
SOURCES = {
    "gsm8k": "gsm8k",
    "countdown": "countdown",
    "dapo": "dapo_math",
    "aime": "dapo_math",
    "math": "math_verify",
}


def together(keys: GivenKeys, command: str) -> Iterator[Computed]:
    yield from trackers(keys, "trainer.logger")
    yield from paths(keys)
    if command != RL:
        yield from supervised(keys)
        return
    yield from data(keys)
    yield from batches(keys)
    yield from kl(keys)
    yield from loss(keys)
    yield from training(keys)
    yield from memory(keys)
    yield from engines(keys)
    yield from rewards(keys)
    yield from teacher(keys)
    yield from correction(keys)
    yield from evaluation(keys)


def files(keys: GivenKeys, key: str) -> str:
    return ",".join(keys.items(key))


def supervised(keys: GivenKeys) -> Iterator[Computed]:
    for flag, key in (("dataset", "data.train_files"), ("eval_dataset", "data.val_files")):
        if names := files(keys, key):
            yield Computed(flag, names, (key,))
    for flag, name in (("input_key", "prompt"), ("output_key", "response")):
        key, inner = f"data.{name}_key", f"data.{name}_dict_keys"  # a column, and a part of it
        if keys.given(inner) or (flag == "output_key" and keys.given(key)):
            column = ".".join([keys.text(key), *keys.items(inner)[:1]])
            yield Computed(flag, column, (key, inner))
    if keys.given("data.train_batch_size"):
        size = "data.train_batch_size"
        yield Computed("train_batch_size", keys.whole(size), (size,), "samples per optimizer step")
    yield from lowest_rate(keys, "optim.min_lr", "optim.lr")
    gpus = "trainer.n_gpus_per_node"
    if keys.given(gpus):
        yield Computed("num_gpus_per_node", keys.whole(gpus), (gpus,))


def data(keys: GivenKeys) -> Iterator[Computed]:
    if names := files(keys, "data.train_files"):
        yield Computed("prompt_data", names, ("data.train_files",))
    key = "data.prompt_key"
    yield Computed("input_key", keys.text(key), (key,))
    yield Computed("label_key", "reward_model.ground_truth", (key,), "the label of verl's rows")
    yield Computed("apply_chat_template", True, (key,), "prompts are chats")
    yield Computed(
        "rollout_batch_size", keys.whole("data.train_batch_size"), ("data.train_batch_size",)
    )
    long, cut = "data.filter_overlong_prompts", keys.text("data.truncation")
    way = cut if cut == "error" else f"truncate_{cut}"
    yield Computed("prompt_overflow", "filter" if keys.on(long) else way, (long, "data.truncation"))
    prefix = "data.apply_chat_template_kwargs."
    if extra := {k: keys.raw(k) for k in keys.values if k.startswith(prefix)}:
        written = {k.removeprefix(prefix): v for k, v in extra.items()}
        yield Computed("chat_template_kwargs", written, tuple(extra), "as JSON")


def batches(keys: GivenKeys) -> Iterator[Computed]:
    """Its workers multiply the prompts of an optimizer step by n."""
    yield prompts_of_step(keys, f"{ACTOR}ppo_mini_batch_size", f"{ROLLOUT}n")
    gpus = keys.whole("trainer.n_gpus_per_node", 8) * keys.whole("trainer.nnodes", 1)
    for flag, names in (
        ("micro_train_batch_size", (f"{ACTOR}ppo_micro_batch_size",)),
        (
            "micro_rollout_batch_size",
            (f"{ROLLOUT}log_prob_micro_batch_size", f"{REF}log_prob_micro_batch_size"),
        ),
    ):
        given = [name for name in names if keys.given(name)]
        if given and not any(keys.given(f"{name}_per_gpu") for name in names):
            each = max(1, min(map(keys.whole, given)) // gpus)
            yield Computed(flag, each, tuple(given), f"of all GPUs there, of each of {gpus} here")
    for flag, name in (
        ("micro_rollout_batch_size", "log_prob_micro_batch_size_per_gpu"),
        ("rollout_max_tokens_per_gpu", "log_prob_max_token_len_per_gpu"),
    ):
        given = [f"{role}{name}" for role in (ROLLOUT, REF) if keys.given(f"{role}{name}")]
        if given:
            note = "the smaller of two" if len(given) > 1 else ""
            yield Computed(flag, min(map(keys.whole, given)), tuple(given), note)


def kl(keys: GivenKeys) -> Iterator[Computed]:
    """Two coefficients there: of the loss and of the reward. One of them is what people use."""
    in_loss, in_reward = f"{ACTOR}use_kl_loss", "algorithm.use_kl_in_reward"
    loss, reward = f"{ACTOR}kl_loss_coef", "algorithm.kl_ctrl.kl_coef"
    if keys.on(in_loss) and keys.on(in_reward):
        yield Computed("init_kl_coef", keys.number(reward), (reward, in_reward))
        yield Computed("add_token_level_kl", True, (in_reward,))
        yield Computed("kl_loss_coef", keys.number(loss), (loss, in_loss))
    elif keys.on(in_loss):
        yield Computed("init_kl_coef", keys.number(loss), (loss, in_loss))
    elif keys.on(in_reward):
        yield Computed("init_kl_coef", keys.number(reward), (reward, in_reward))
    else:
        none = "neither in the loss nor in the reward: no reference is loaded"
        unsaid = keys.number(reward) and keys.given(reward) and not keys.given(in_reward)
        if unsaid:  # before 0.3 it went into the reward wherever use_kl_loss was off
            none = f"before verl 0.3 in the reward: --init_kl_coef {keys.number(reward)}"
        verdict = "differs" if unsaid else "converted"
        given = (reward, in_reward, in_loss) if unsaid else (in_reward, in_loss, loss, reward)
        yield Computed("init_kl_coef", 0.0, given, none, verdict)
        return
    kind = f"{ACTOR}kl_loss_type" if keys.on(in_loss) else "algorithm.kl_penalty"
    if keys.on(in_loss):
        yield Computed("use_kl_loss", True, (in_loss,))
    name = keys.text(kind)
    yield Computed("kl_estimator", KL.get(name.rstrip("+"), name), (kind,))
    if keys.on(in_reward) and keys.text("algorithm.kl_ctrl.type") == "adaptive":
        for flag, key in (("kl_target", "target_kl"), ("kl_horizon", "horizon")):
            written = f"algorithm.kl_ctrl.{key}"
            yield Computed(flag, keys.text(written), (written, "algorithm.kl_ctrl.type"))


def loss(keys: GivenKeys) -> Iterator[Computed]:
    kind = keys.text(f"{ACTOR}policy_loss.loss_mode") or "vanilla"
    both = f"{ACTOR}clip_ratio"
    ends = [f"{both}_low", f"{both}_high"]
    low, high = (keys.number(end, keys.number(both)) for end in ends)
    values = [str(min(low, 1.0)), str(high)]  # people write 10 for no limit below
    if kind in ("vanilla", "gspo", "gspo_token", "cispo", "clip_cov", "geo_mean", "dppo_tv"):
        yield Computed("eps_clip_low_high", values, (*ends, both))
    if kind in ("vanilla", "clip_cov"):
        yield Computed("dual_clip", keys.number(f"{both}_c"), (f"{both}_c",))
    mode = f"{ACTOR}loss_agg_mode"
    of_sequences = kind in ("gspo", "geo_mean")
    note = f"always so with {kind}" if of_sequences else ""
    agg = "seq-mean-token-mean" if of_sequences else keys.text(mode)
    yield Computed("loss_agg_mode", agg, (mode,), note)
    cov = [f"{ACTOR}policy_loss.clip_cov_{end}" for end in ("lb", "ub")]
    if kind == "clip_cov" and any(map(keys.given, cov)):
        spans = [
            str(keys.number(key, otherwise)) for key, otherwise in zip(cov, (1.0, 5.0), strict=True)
        ]
        yield Computed("clip_cov_range", spans, tuple(cov))


def training(keys: GivenKeys) -> Iterator[Computed]:
    optim = f"{ACTOR}optim."
    style = (
        f"{optim}warmup_style"
        if keys.given(f"{optim}warmup_style")
        else f"{optim}lr_scheduler_type"
    )
    ratio, steps = f"{optim}lr_warmup_steps_ratio", f"{optim}lr_warmup_steps"
    yield from scheduler(keys, style, ratio, steps)
    yield from lowest_rate(keys, f"{optim}min_lr", f"{optim}lr")
    if keys.whole(f"{MODEL}lora_rank") and (targets := keys.items(f"{MODEL}target_modules")):
        yield Computed("target_modules", targets, (f"{MODEL}target_modules",))
    contents = f"{ACTOR}checkpoint.save_contents"
    if "hf_model" in keys.items(contents):
        yield Computed("save_hf_ckpt", True, (contents,))
    if keys.text("algorithm.adv_estimator") in ("", "gae"):
        for flag, key in (
            ("critic_pretrain", "critic.model.path"),
            ("critic_learning_rate", "critic.optim.lr"),
        ):
            if value := keys.text(key):
                yield Computed(flag, value, (key,))


def memory(keys: GivenKeys) -> Iterator[Computed]:
    """What leaves the GPU between phases, by whichever engine trains there."""

    def first(kinds: Sequence[str], what: str) -> str:
        names = [f"{ACTOR}{kind}.{what}_offload" for kind in kinds]
        return next((name for name in names if keys.given(name)), names[0])

    kinds = ("fsdp_config", "megatron", "veomni", "engine")
    moments = first(kinds, "optimizer")
    stays = f"{ACTOR}optim.override_optimizer_config.optimizer_cpu_offload"
    yield from sleeping(keys, first(kinds, "param"), "" if keys.on(stays) else moments)


def engines(keys: GivenKeys) -> Iterator[Computed]:
    gpus, size = "trainer.n_gpus_per_node", f"{ROLLOUT}tensor_model_parallel_size"
    for found in colocated(keys, gpus, "trainer.nnodes", size):
        if found.flag != "vllm_enable_sleep":  # free_cache_engine says it
            yield found
    extra: dict[str, Any] = {}
    prefix = f"{ROLLOUT}engine_kwargs.vllm."
    named = [k for k in keys.values if k.startswith(prefix) and k != f"{prefix}max_model_len"]
    for key in named:
        put(extra, key.removeprefix(prefix), keys.raw(key))
    if extra:
        yield Computed("vllm_engine_kwargs", extra, tuple(named), "as JSON")
    if rate := keys.number(f"{ROLLOUT}over_sample_rate"):
        key = f"{ROLLOUT}over_sample_rate"
        yield Computed("oversample_ratio", round(1 / (1 - min(rate, 0.9)), 3), (key,))


def teacher(keys: GivenKeys) -> Iterator[Computed]:
    """On-policy distillation."""
    if not keys.on(DISTILLS):
        return
    paths = [key for key in keys.values if key.startswith(TEACHER) and key.endswith(".model_path")]
    if len(paths) == 1:
        yield Computed("teacher_pretrain", keys.text(paths[0]), (*paths, DISTILLS))
    elif paths:
        of = {path: path.removesuffix("model_path") + "key" for path in paths}
        rows = {keys.text(key) or key.split(".")[2]: keys.text(path) for path, key in of.items()}
        file = ", ".join(f"{source}: {{{model}: 1}}" for source, model in rows.items())
        note = f"--teacher_routing FILE.yaml that says {file}"
        yield Computed("teacher_pretrain", None, (*paths, *of.values()), note, "none")
    mode, by_gradient = f"{LOSS}loss_mode", f"{LOSS}use_policy_gradient"
    kind = keys.text(mode)
    if keys.on(by_gradient):
        note = "log q - log p of the sampled token" if kind != "k1" else ""
        verdict = "differs" if note else "converted"
        yield Computed("teacher_mode", "advantage", (mode, by_gradient), note, verdict)
    else:
        topk = "topk" in kind
        note = "" if topk else "of distributions instead of an estimate from the sampled token"
        name = "forward_kl" if topk else "reverse_kl"
        verdict = "converted" if topk else "differs"
        yield Computed("teacher_mode", name, (mode, by_gradient), note, verdict)
        yield Computed("teacher_topk", keys.whole(f"{LOSS}topk", 128), (f"{LOSS}topk",))
    if keys.on(f"{LOSS}use_task_rewards"):
        weight = f"{LOSS}distillation_loss_coef"
        yield Computed("teacher_coef", keys.number(weight), (weight,))


def rewards(keys: GivenKeys) -> Iterator[Computed]:
    if keys.on(DISTILLS) and not keys.on(f"{LOSS}use_task_rewards"):
        return  # the teacher alone
    functions = ("reward.custom_reward_function.path", "custom_reward_function.path")
    models = ("reward.reward_model.model_path", "reward_model.model.path")
    if not any(map(keys.given, (*functions, *models))):
        names = files(keys, "data.train_files").lower()
        found = [here for part, here in SOURCES.items() if part in names]
        if found:
            note = "by its name; there data_source tells; your own instead: --reward_funcs, empty"
            yield Computed("reward_funcs", found[:1], ("data.train_files",), note, "differs")
        else:
            note = "there data_source tells the reward: --reward_funcs, or --remote_rm_url"
            yield Computed("reward_funcs", None, ("data.train_files",), note, "none")
    for prefix in ("reward.custom_reward_function.", "custom_reward_function."):
        if path := keys.text(f"{prefix}path"):
            name = keys.text(f"{prefix}name")
            yield Computed("remote_rm_url", f"{path}:{name}", (f"{prefix}path", f"{prefix}name"))
    for prefix in ("reward.", "reward_model."):
        own = f"{prefix}reward_kwargs."
        buffer = f"{own}overlong_buffer_cfg."
        if keys.on(f"{buffer}enable") and keys.whole(f"{buffer}len"):
            named = (f"{buffer}len", f"{buffer}enable")
            yield Computed("overlong_buffer_len", keys.whole(f"{buffer}len"), named)
            factor = f"{buffer}penalty_factor"
            yield Computed("overlong_penalty_factor", keys.number(factor, 1.0), (factor,))
        others = [
            k
            for k in keys.values
            if k.startswith(own) and not k.startswith(buffer) and not k.endswith("max_resp_len")
        ]
        if others:
            extra: dict[str, Any] = {}
            for key in others:
                put(extra, key.removeprefix(own), keys.raw(key))
            yield Computed("reward_func_kwargs", extra, tuple(others), "as JSON")


def correction(keys: GivenKeys) -> Iterator[Computed]:
    prefix = "algorithm.rollout_correction."
    if keys.on(f"{prefix}bypass_mode"):  # the engine's log-probs are the old ones
        note = "the clip then bounds the mismatch, and nothing else weighs it"
        yield Computed("skip_old_logprob", "always", (f"{prefix}bypass_mode",), note, "differs")
        return
    if (level := keys.text(f"{prefix}rollout_is")) and level != "false":
        yield Computed("enable_vllm_is_correction", True, (f"{prefix}rollout_is",))
        yield Computed("vllm_is_level", level, (f"{prefix}rollout_is",))
        cap = f"{prefix}rollout_is_threshold"
        yield Computed(
            "vllm_is_truncated_threshold", ["0.0", str(keys.number(cap))], (cap,), "0 and the cap"
        )
        normal = f"{prefix}rollout_is_batch_normalize"
        if keys.on(normal):
            yield Computed("vllm_is_batch_normalize", True, (normal,))
    if names := keys.items(f"{prefix}rollout_rs"):
        yield Computed("rollout_rs", names, (f"{prefix}rollout_rs",))
        yield Computed(
            "rollout_rs_threshold",
            keys.items(f"{prefix}rollout_rs_threshold"),
            (f"{prefix}rollout_rs_threshold",),
        )


def evaluation(keys: GivenKeys) -> Iterator[Computed]:
    if names := files(keys, "data.val_files"):
        yield Computed("eval_dataset", names, ("data.val_files",))
        yield Computed(
            "eval_before_train", keys.on("trainer.val_before_train"), ("trainer.val_before_train",)
        )
        if keys.given("trainer.test_freq"):
            yield Computed("eval_steps", keys.whole("trainer.test_freq"), ("trainer.test_freq",))
        val = f"{ROLLOUT}val_kwargs."
        sampled = keys.on(f"{val}do_sample")
        heat = keys.number(f"{val}temperature") if sampled else 0.0
        note = "" if sampled else "greedy"
        yield Computed("eval_temperature", heat, (f"{val}temperature", f"{val}do_sample"), note)
    profiler = keys.text("global_profiler.tool")
    if profiler and (steps := keys.items("global_profiler.steps")):
        yield Computed("profile_steps", steps, ("global_profiler.steps",))


def paths(keys: GivenKeys) -> Iterator[Computed]:
    key = "trainer.default_local_dir"
    project = keys.text("trainer.project_name") or "verl_examples"
    path = (
        keys.text(key) or f"checkpoints/{project}/{keys.text('trainer.experiment_name') or 'gsm8k'}"
    )
    yield Computed("save_path", path, (key,))
    yield Computed("ckpt_path", f"{path}/ckpt", (key,))
    if keys.text("trainer.resume_mode") == "auto" and not keys.given("trainer.resume_from_path"):
        yield Computed("load_checkpoint", True, ("trainer.resume_mode",))
