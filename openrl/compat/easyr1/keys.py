"""EasyR1's keys that several flags of ours share, or the other way round."""

from __future__ import annotations

from collections.abc import Iterator

from openrl.compat.shared.keys import (
    KL,
    colocated,
    data,
    prompts_of_step,
    scheduler,
    sleeping,
    trackers,
)
from openrl.config.importing.convert import Computed, GivenKeys

ACTOR, ROLLOUT, TRAINER = "worker.actor.", "worker.rollout.", "trainer."


def together(keys: GivenKeys, command: str) -> Iterator[Computed]:
    yield from data(keys, "data.train_files", "prompt_data", "prompt_split")
    yield from data(keys, "data.val_files", "eval_dataset", "eval_split")
    yield Computed("apply_chat_template", True, ("data.prompt_key",), "always so there")
    yield from batches(keys)
    yield from kl(keys)
    yield from loss(keys)
    yield from training(keys)
    gpus, nodes = f"{TRAINER}n_gpus_per_node", f"{TRAINER}nnodes"
    yield from colocated(keys, gpus, nodes, f"{ROLLOUT}tensor_parallel_size")
    offload = f"{ACTOR}offload.offload_"
    yield from sleeping(keys, f"{offload}params", f"{offload}optimizer")
    yield from trackers(keys, f"{TRAINER}logger")
    yield from running(keys)


def batches(keys: GivenKeys) -> Iterator[Computed]:
    """Its workers multiply the prompts of an optimizer step by n; tokens of a micro-batch are its
    rows times the width to which rows were padded."""
    yield prompts_of_step(keys, f"{ACTOR}global_batch_size", f"{ROLLOUT}n")
    switch = f"{ACTOR}dynamic_batching"
    if not keys.on(switch):
        return
    yield Computed("use_dynamic_batch", True, (switch,))
    widths = ("data.max_prompt_length", "data.max_response_length")
    width = sum(keys.whole(key) for key in widths)
    for flag, what in (("train", "update"), ("rollout", "experience")):
        micro = f"{ACTOR}micro_batch_size_per_device_for_{what}"
        rows = keys.whole(micro, 1)
        tokens = (switch, micro, *widths)
        yield Computed(
            f"{flag}_max_tokens_per_gpu", rows * width, tokens, f"{rows} x {width} tokens"
        )


def is_old(keys: GivenKeys) -> bool:
    """Whether a file is of a version before 0.3, whose coefficients stood with the actor."""
    names = ("use_kl_loss", "kl_loss_coef", "entropy_coeff", "clip_ratio")
    return any(keys.given(f"{ACTOR}{name}") for name in names)


def kl(keys: GivenKeys) -> Iterator[Computed]:
    in_loss, weight = f"{ACTOR}use_kl_loss", f"{ACTOR}kl_loss_coef"
    if is_old(keys) and keys.text(in_loss).lower() != "false":
        yield Computed("init_kl_coef", keys.number(weight, 1e-3), (weight, in_loss))
        yield Computed("use_kl_loss", True, (in_loss,))
        name = keys.text(f"{ACTOR}kl_loss_type") or "low_var_kl"
        yield Computed("kl_estimator", KL.get(name, name), (f"{ACTOR}kl_loss_type",))
        return
    off, coefficient = "algorithm.disable_kl", "algorithm.kl_coef"
    if keys.on(off):
        yield Computed("init_kl_coef", 0.0, (off, coefficient), "no reference is loaded")
        return
    yield Computed("init_kl_coef", keys.number(coefficient), (coefficient, off))
    if keys.on("algorithm.use_kl_loss"):
        yield Computed("use_kl_loss", True, ("algorithm.use_kl_loss",))
    name = keys.text("algorithm.kl_penalty") or "kl"
    yield Computed("kl_estimator", KL.get(name, name), ("algorithm.kl_penalty",))
    if keys.text("algorithm.kl_type") == "adaptive":
        kind = "algorithm.kl_type"
        yield Computed(
            "kl_target", keys.number("algorithm.kl_target"), ("algorithm.kl_target", kind)
        )
        yield Computed(
            "kl_horizon", keys.whole("algorithm.kl_horizon"), ("algorithm.kl_horizon", kind)
        )


def loss(keys: GivenKeys) -> Iterator[Computed]:
    """sapo has gates in the place of clips; the bound for negative advantages is that of ppo."""
    kind = keys.text(f"{ACTOR}loss_type") or "default"
    if kind == "sapo":
        for flag, key in (("sapo_tau_pos", "tau_positive"), ("sapo_tau_neg", "tau_negative")):
            if keys.given(f"{ACTOR}{key}"):
                yield Computed(flag, keys.number(f"{ACTOR}{key}"), (f"{ACTOR}{key}",))
        return
    if is_old(keys):
        both = f"{ACTOR}clip_ratio"
        yield Computed("eps_clip_low_high", [str(keys.number(both, 0.2))] * 2, (both,))
        return
    low, high = (f"{ACTOR}clip_ratio_{end}" for end in ("low", "high"))
    yield Computed(
        "eps_clip_low_high", [str(keys.number(low)), str(keys.number(high))], (low, high)
    )
    if kind == "default":
        yield Computed(
            "dual_clip", keys.number(f"{ACTOR}clip_ratio_dual"), (f"{ACTOR}clip_ratio_dual",)
        )


def training(keys: GivenKeys) -> Iterator[Computed]:
    optimizer, stored = f"{ACTOR}optim.strategy", f"{ACTOR}fsdp.torch_dtype"
    light = keys.text(optimizer) == "adamw_bf16" or keys.text(stored) in ("bf16", "bfloat16")
    yield Computed("optimizer", "adamw_bf16" if light else "adamw", (optimizer, stored))
    if keys.text(stored):
        yield Computed("param_dtype", keys.text(stored).replace("float", "f"), (stored,))
    optim = f"{ACTOR}optim.lr_"
    yield from scheduler(
        keys, f"{optim}scheduler_type", f"{optim}warmup_ratio", f"{optim}warmup_steps"
    )
    lora = f"{ACTOR}model.lora."
    if keys.whole(f"{lora}rank"):
        yield Computed("lora_alpha", keys.whole(f"{lora}alpha"), (f"{lora}alpha",))
        if targets := keys.items(f"{lora}target_modules"):
            yield Computed("target_modules", targets, (f"{lora}target_modules",))
        if left := keys.text(f"{lora}exclude_modules"):
            yield Computed("lora_exclude_modules", left, (f"{lora}exclude_modules",))


def running(keys: GivenKeys) -> Iterator[Computed]:
    """Filters, validation, rewards and paths."""
    if keys.on("algorithm.online_filtering"):
        key = keys.text("algorithm.filter_key")
        yield Computed(
            "dynamic_filtering_key", "score" if key == "overall" else key, ("algorithm.filter_key",)
        )
        ends = ("algorithm.filter_low", "algorithm.filter_high")
        yield Computed("dynamic_filtering_reward_range", [str(keys.number(k)) for k in ends], ends)
        tries = f"{TRAINER}max_try_make_batch"
        yield Computed("dynamic_filtering_max_batches", max(0, keys.whole(tries)), (tries,))
    if keys.items("data.val_files"):
        if keys.given(f"{TRAINER}val_freq"):
            yield Computed("eval_steps", keys.whole(f"{TRAINER}val_freq"), (f"{TRAINER}val_freq",))
        before = f"{TRAINER}val_before_train"
        yield Computed("eval_before_train", keys.on(before), (before,))
    reward = "worker.reward.reward_function"
    if path := keys.text(reward):
        yield Computed("remote_rm_url", path if ":" in path else f"{path}:main", (reward,))
    key = f"{TRAINER}save_checkpoint_path"
    names = [keys.text(f"{TRAINER}{name}") for name in ("project_name", "experiment_name")]
    path = keys.text(key) or "/".join(("checkpoints", names[0] or "easy_r1", names[1] or "demo"))
    yield Computed("save_path", path, (key,))
    yield Computed("ckpt_path", f"{path}/ckpt", (key,))
