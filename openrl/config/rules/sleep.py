"""Rules of sleep and offload: what they need, and what they cannot mean."""

from __future__ import annotations

from openrl.config.commands import PPOConfig
from openrl.config.derived import model_roles, ref_reward_sleeps
from openrl.config.placement import ENGINES, roles_on_shared_places
from openrl.flags.checks import Given, Problem, Problems, check

SHARE = "--colocate_all_models, or the same places in --placement"


@check(PPOConfig)
def who_sleeps_shares_places(config: PPOConfig, given: Given) -> Problems:
    hybrid, shared = config.hybrid, roles_on_shared_places(config)
    apart = config.asynchrony.async_train  # another rule says that engines do not sleep then
    if hybrid.vllm_enable_sleep and ENGINES not in shared and not apart:
        yield Problem(
            ("vllm_enable_sleep",),
            "the engines share no GPU with another role, so the freed memory is useless",
            SHARE,
        )
    if hybrid.deepspeed_enable_sleep and not shared & {"actor", "critic"}:
        yield Problem(
            ("deepspeed_enable_sleep",),
            "no trained model shares a GPU with another role, so the freed memory is useless",
            SHARE,
        )
    of_two = {"reference", "reward"} & {*model_roles(config)}
    if ref_reward_sleeps(config) and of_two and not shared & of_two:
        yield Problem(
            ("ref_reward_offload", "zero_stage"),
            f"{' and '.join(sorted(of_two))} share no GPU, and only ZeRO 3 streams weights layer"
            " by layer",
            f"--zero_stage 3, or {SHARE}",
        )


@check(PPOConfig)
def dropped_weights_are_sent_again(config: PPOConfig, given: Given) -> Problems:
    """Level 2 leaves an engine without weights until a sync, so a sync must bring every weight in
    the form that the engine computes with."""
    if not config.hybrid.vllm_enable_sleep or config.hybrid.vllm_sleep_level == 1:
        return
    against = {
        "weight_sync_interval": (
            config.engine.weight_sync_interval > 1,
            "weights are not sent after every step",
        ),
        "lora_sync": (config.lora.lora_sync == "adapter", "the base of an adapter is never sent"),
        "vllm_quantization": (
            config.engine.vllm_quantization is not None,
            "quantisation scales are made only when a model is loaded",
        ),
    }
    for flag, (stands, why) in against.items():
        if stands:
            yield Problem(
                ("vllm_sleep_level", flag),
                f"level 2 drops the engines' weights, and {why}",
                "--vllm_sleep_level 1",
            )


@check(PPOConfig)
def sleep_names_states(config: PPOConfig, given: Given) -> Problems:
    states = config.hybrid.deepspeed_sleep_states
    if not states or len({*states}) < len(states):
        yield Problem(
            ("deepspeed_sleep_states",),
            "is empty, or names a state twice",
            "--deepspeed_sleep_states optim grad",
        )
    offloads = {
        "param": ("param_offload", config.deepspeed.param_offload),
        "optim": ("adam_offload", config.deepspeed.adam_offload),
    }
    for state, (flag, acts) in offloads.items():
        if acts and state in states and "deepspeed_sleep_states" in given:
            others = " ".join(other for other in states if other != state) or "grad"
            yield Problem(
                ("deepspeed_sleep_states", flag),
                f"{state} is already in host memory",
                f"--deepspeed_sleep_states {others}",
            )
