"""MindSpeed-RL's keys that several flags of ours share, or the other way round.

It counts prompts: global_batch_size of a step, mini_batch_size of an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator

from openrl.compat.shared.keys import KL, lowest_rate, prompts_of_step, sleeping
from openrl.config.importing.convert import Computed, GivenKeys

MEGATRON, ACTOR, RL, ENGINE = (
    "megatron_training.",
    "actor_config.",
    "rl_config.",
    "generate_config.",
)
SCHEDULES = {"cosine": "cosine_with_min_lr", "inverse-square-root": "inverse_sqrt"}
CARDS = 8  # of a node


def together(keys: GivenKeys, command: str) -> Iterator[Computed]:
    trained = ACTOR if command == "train_ppo_ray" else MEGATRON
    yield from optimizer(keys, trained)
    yield from model(keys, trained)
    if command != "train_ppo_ray":
        key = f"{MEGATRON}global_batch_size"
        yield Computed("train_batch_size", keys.whole(key, 1), (key,), "pairs per optimizer step")
        if keys.given(f"{MEGATRON}seq_length"):
            length = f"{MEGATRON}seq_length"
            yield Computed("max_len", keys.whole(length), (length,))
        return
    yield from batches(keys)
    yield from algorithm(keys)
    yield from kl(keys)
    yield from filters(keys)
    yield from rewards(keys)
    yield from placement(keys)


def batches(keys: GivenKeys) -> Iterator[Computed]:
    filters = f"{RL}filter_groups_enable"
    wanted = f"{RL}filter_groups_train_batch_size"
    key = wanted if keys.on(filters) and keys.given(wanted) else f"{MEGATRON}global_batch_size"
    if keys.given(key):
        yield Computed("rollout_batch_size", keys.whole(key), (key,), "prompts")
    yield prompts_of_step(keys, f"{RL}mini_batch_size", f"{RL}n_samples_per_prompt")
    sizes = [f"{RL}{role}_forward_micro_batch_size" for role in ("actor", "ref")]
    if given := [key for key in sizes if keys.given(key)]:
        note = "the smaller of two" if len(given) > 1 else ""
        yield Computed("micro_rollout_batch_size", min(map(keys.whole, given)), tuple(given), note)
    if keys.on(f"{RL}use_dynamic_bsz"):
        most = f"{RL}max_packing_token_size"
        for flag, role in (
            ("train_max_tokens_per_gpu", "update"),
            ("rollout_max_tokens_per_gpu", "actor"),
        ):
            own = f"{RL}{role}_max_packing_token_size"
            key = own if keys.given(own) else most
            if keys.given(key):
                yield Computed(flag, keys.whole(key), (key,))


def optimizer(keys: GivenKeys, role: str) -> Iterator[Computed]:
    betas = [f"{role}adam_beta{number}" for number in (1, 2)]
    values = [keys.number(betas[0], 0.9), keys.number(betas[1], 0.999)]
    yield Computed("adam_betas", list(map(str, values)), tuple(betas))
    style = keys.text(f"{role}lr_decay_style") or "linear"
    warm = keys.number(f"{role}lr_warmup_fraction") > 0
    name = SCHEDULES.get(style, style)
    name = "constant_with_warmup" if name == "constant" and warm else name
    yield Computed("lr_scheduler", name, (f"{role}lr_decay_style", f"{role}lr_warmup_fraction"))
    yield from lowest_rate(keys, f"{role}min_lr", f"{role}lr")


def model(keys: GivenKeys, role: str) -> Iterator[Computed]:
    name = f"{MEGATRON}tokenizer_name_or_path"
    if keys.given(name):
        yield Computed("pretrain", keys.text(name), (name,), "the Hugging Face model")
    if keys.given(f"{role}save"):
        path = keys.text(f"{role}save")
        yield Computed("save_path", path, (f"{role}save",))
        yield Computed("ckpt_path", f"{path}/ckpt", (f"{role}save",))
    if keys.given(f"{RL}tool_config_path"):
        tools = f"{RL}tool_config_path"
        yield Computed("apply_chat_template", True, (tools,), "which describes the tools")
    for block in (MEGATRON, ACTOR):
        how = f"{block}recompute_granularity"
        if keys.given(how):
            method = f"{block}recompute_method"
            selective = keys.text(how) == "selective"
            chosen = "selective" if selective else keys.text(method) or "uniform"
            yield Computed("gradient_checkpointing", True, (how,))
            yield Computed("gradient_checkpointing_method", chosen, (method, how))
            layers = f"{block}recompute_num_layers"
            if keys.given(layers) and not selective:
                yield Computed("gradient_checkpointing_num_layers", keys.whole(layers), (layers,))
            return


def algorithm(keys: GivenKeys) -> Iterator[Computed]:
    stage, named = keys.text(f"{MEGATRON}stage"), f"{RL}adv_estimator"
    estimator = "gae" if stage == "ray_ppo" else keys.text(named)
    yield Computed("advantage_estimator", estimator, (named, f"{MEGATRON}stage"))
    if estimator == "gae":
        yield Computed("lambd", keys.number(f"{RL}lam", 0.95), (f"{RL}lam",))
    if keys.on(f"{RL}clip_higher_enable"):
        ends = [f"{RL}clip_ratio_{end}" for end in ("low", "high")]
        values = [str(keys.number(key)) for key in ends]
        yield Computed("eps_clip_low_high", values, (*ends, f"{RL}clip_higher_enable"))
    if keys.on(f"{RL}overlong_buffer_enable") and keys.whole(f"{RL}overlong_buffer"):
        length = f"{RL}overlong_buffer"
        wanted = (length, f"{RL}overlong_buffer_enable")
        yield Computed("overlong_buffer_len", keys.whole(length), wanted)
        factor = f"{RL}overlong_buffer_penalty_factor"
        yield Computed("overlong_penalty_factor", keys.number(factor, 1.0), (factor,))


def kl(keys: GivenKeys) -> Iterator[Computed]:
    """A KL loss, unless it is subtracted from rewards. Its DAPO trainer has no reference."""
    coefficient = f"{RL}init_kl_coef"
    value = 0.0 if keys.text(f"{MEGATRON}stage") == "ray_dapo" else keys.number(coefficient)
    note = "" if value else "no reference is loaded"
    yield Computed("init_kl_coef", value, (coefficient,), note)
    if not value:
        return
    if not keys.on(f"{RL}use_kl_in_reward"):
        yield Computed("use_kl_loss", True, (coefficient, f"{RL}use_kl_in_reward"))
    name = keys.text(f"{RL}kl_penalty")
    yield Computed("kl_estimator", KL.get(name, name), (f"{RL}kl_penalty",))
    if keys.text(f"{RL}kl_ctrl_type") == "adaptive" and keys.given(f"{RL}kl_target"):
        yield Computed("kl_target", keys.number(f"{RL}kl_target"), (f"{RL}kl_target",))
        yield Computed("kl_horizon", keys.whole(f"{RL}kl_horizon"), (f"{RL}kl_horizon",))


def filters(keys: GivenKeys) -> Iterator[Computed]:
    if not keys.on(f"{RL}filter_groups_enable"):
        return
    metric, rounds = f"{RL}filter_groups_metric", f"{RL}filter_groups_max_batches"
    if keys.given(metric):
        yield Computed(
            "dynamic_filtering_key", keys.text(metric), (metric,), "a verifier's own score"
        )
    if keys.given(rounds):
        yield Computed("dynamic_filtering_max_batches", max(0, keys.whole(rounds)), (rounds,))


def rewards(keys: GivenKeys) -> Iterator[Computed]:
    names, weights = (f"{RL}verifier_{what}" for what in ("function", "weight"))
    if keys.text(f"{RL}rule_reward") != "false":
        wanted = keys.items(names) or ["base_acc"]
        yield Computed("reward_funcs", wanted, (names, f"{RL}rule_reward"))
        if keys.items(weights):
            yield Computed("reward_weights", keys.items(weights), (weights,))
    columns = f"{MEGATRON}dataset_additional_keys"
    if "labels" in keys.items(columns):
        yield Computed("label_key", "labels", (columns,))
    if keys.on(f"{RL}use_tensorboard"):
        path = f"{keys.text(f'{ACTOR}save') or '.'}/tensorboard"
        yield Computed("use_tensorboard", path, (f"{RL}use_tensorboard",), "a directory")


def placement(keys: GivenKeys) -> Iterator[Computed]:
    cards, size = f"{RL}actor_resource.num_npus", f"{ENGINE}infer_tensor_parallel_size"
    each = max(1, keys.whole(size))
    yield Computed("vllm_tensor_parallel_size", each, (size,))
    together = f"{RL}use_integrated_worker"
    if keys.given(cards):
        count = keys.whole(cards)
        nodes = max(1, count // CARDS)
        note = f"{count} cards as nodes of {CARDS}"
        yield Computed("actor_num_gpus_per_node", count // nodes, (cards,), note)
        yield Computed("actor_num_nodes", nodes, (cards,))
        yield Computed(
            "vllm_num_engines", max(1, count // each), (size, cards), f"{count} / {each}"
        )
    if keys.on(together):
        yield Computed("colocate_all_models", True, (together,))
        yield Computed("vllm_enable_sleep", True, (together,))
        offload = f"{ENGINE}offload_train_"
        yield from sleeping(keys, f"{offload}param", f"{offload}optimizer")
