"""Rules of placement, sleep and offload: what they need, and what they cannot mean."""

from __future__ import annotations

from collections.abc import Mapping

from openrl.config.commands import PPOConfig
from openrl.config.derived import (
    leaders,
    ref_reward_sleeps,
    roles_on_shared_places,
    trained_ranks,
)
from openrl.config.groups.placement import ENGINES, FLAG_NAMES
from openrl.flags.checks import Given, Problems, check, in_use, problem, warning

COLOCATE = (
    "colocate_all_models",
    "colocate_actor_ref",
    "colocate_critic_reward",
    "colocate_actor_teacher",
)
SHARE = "--colocate_all_models, or the same places in --placement"
SHAPES = tuple(
    f"{prefix}_{shape}"
    for role, prefix in FLAG_NAMES.items()
    if role != ENGINES
    for shape in ("num_nodes", "num_gpus_per_node")
)


@check
def placement_says_it_all(config: PPOConfig, given: Given) -> Problems:
    if config.placement.placement is None:
        return
    if others := tuple(name for name in (*COLOCATE, *SHAPES) if name in given):
        message = "--placement already says where every rank runs"
        yield problem(("placement", *others), message, "leave the others out")
    yield from _places_fit(config, config.placement.explicit_places)


def _places_fit(config: PPOConfig, places: Mapping[str, tuple[int, ...]]) -> Problems:
    run = {*config.model_roles, ENGINES}
    for role in sorted(run - places.keys()):
        name = FLAG_NAMES[role]
        message = f"{name} has no place, but this run needs it"
        yield problem(("placement",), message, f'add "{name}=..."')
    for role in sorted(places.keys() - run):
        message = f"{FLAG_NAMES[role]} has a place, but this run does not use it"
        yield problem(("placement",), message)
    taken = set().union(*places.values())
    if unused := sorted(set(range(max(taken, default=0))) - taken):
        message = f"no role uses the places {', '.join(map(str, unused))}"
        yield problem(("placement",), message, "number the places without gaps")


@check
def colocated_models_are_equal(config: PPOConfig) -> Problems:
    """Models that share places must have as many ranks on as many nodes."""
    for role, leader in leaders(config).items():
        if role == ENGINES:
            continue
        shapes = zip(config.placement.shape(role), config.placement.shape(leader), strict=True)
        for name, (follows, leads) in zip(("num_nodes", "num_gpus_per_node"), shapes, strict=True):
            if follows != leads:
                flag = f"{FLAG_NAMES[role]}_{name}"
                message = f"{role} and {leader} share places, so their numbers must be equal"
                fix = f"leave --{flag} out" + (f", or --{flag} {leads}" if leads else "")
                yield problem((flag, f"{FLAG_NAMES[leader]}_{name}"), message, fix)


@check
def engines_fill_their_places(config: PPOConfig) -> None:
    """Whole engines, as many as the flags say, must fill the places that they share or that
    --placement gives them. If only the cluster knows how many these are, the planner checks it."""
    sizes, engines = config.engine.sizes, config.engine.vllm_num_engines
    explicit, world = config.placement.explicit_places, trained_ranks(config)
    if ENGINES in explicit:
        sizes.check_fill(len(explicit[ENGINES]), engines, "placement")
    elif ENGINES in leaders(config) and world is not None:
        sizes.check_fill(world, engines, "colocate_all_models")


# -- sleep and offload -----------------------------------------------------------------------------


@check
def who_sleeps_shares_places(config: PPOConfig) -> Problems:
    hybrid, shared = config.hybrid, roles_on_shared_places(config)
    apart = config.asynchrony.async_train  # another rule says that engines do not sleep then
    if hybrid.vllm_enable_sleep and ENGINES not in shared and not apart:
        message = "the engines share no GPU with another role, so the freed memory is useless"
        yield problem(("vllm_enable_sleep",), message, SHARE)
    if hybrid.deepspeed_enable_sleep and not shared & {"actor", "critic"}:
        message = "no trained model shares a GPU with another role, so the freed memory is useless"
        yield problem(("deepspeed_enable_sleep",), message, SHARE)
    frozen = {"reference", "reward", "teacher"} & {*config.model_roles}
    if ref_reward_sleeps(config) and frozen and not shared & frozen:
        message = f"{' and '.join(sorted(frozen))} share no GPU, and only ZeRO 3 streams weights"
        yield problem(("ref_reward_offload", "zero_stage"), message, f"--zero_stage 3, or {SHARE}")


@check
def dropped_weights_are_sent_again(config: PPOConfig) -> Problems:
    """Level 2 leaves an engine without weights until a sync, so a sync must bring every weight in
    the form that the engine computes with."""
    if not config.hybrid.vllm_enable_sleep or config.hybrid.vllm_sleep_level == 1:
        return
    why = {
        "weight_sync_interval": "weights are not sent after every step",
        "lora_sync": "the base of an adapter is never sent",
        "vllm_quantization": "quantisation scales are made only when a model is loaded",
    }
    late = ("weight_sync_interval",) if config.engine.weight_sync_interval > 1 else ()
    for flag in (*late, *in_use(config, "vllm_quantization", lora_sync="adapter")):
        message = f"level 2 drops the engines' weights, and {why[flag]}"
        yield problem(("vllm_sleep_level", flag), message, "--vllm_sleep_level 1")


@check
def sleep_names_states(config: PPOConfig, given: Given) -> Problems:
    states, name = config.hybrid.deepspeed_sleep_states, "deepspeed_sleep_states"
    if name not in given or not config.hybrid.deepspeed_enable_sleep:
        return
    if not states or len({*states}) < len(states):
        message = "is empty, or names a state twice"
        yield problem((name,), message, f"--{name} optim grad")
    flags = {"param": "param_offload", "optim": "adam_offload"}
    there = [s for s in states if s in flags and in_use(config, flags[s])]
    if there:
        others = [state for state in states if state not in there]
        message = f"{' and '.join(there)}: in host memory already"
        fix = f"--{name} {' '.join(others)}" if others else "leave --deepspeed_enable_sleep out"
        yield warning((name, *(flags[state] for state in there)), message, fix)
