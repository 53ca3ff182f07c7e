"""Rules of rollouts that outlive a training step or run beside it."""

from __future__ import annotations

from openrl.config.commands import PPOConfig
from openrl.config.derived import off_policy_flags, roles_on_shared_places
from openrl.config.groups.placement import ENGINES
from openrl.errors import counted
from openrl.flags.checks import Problems, check, in_use, problem, warning


@check
def engines_of_their_own_generate_ahead(config: PPOConfig) -> Problems:
    if not config.asynchrony.async_train:
        return
    if ENGINES in roles_on_shared_places(config):
        message = "engines that generate during training cannot share GPUs with models"
        yield problem(("async_train", "placement"), message, '--placement "actor=0-3;vllm=4-7"')
    if config.hybrid.vllm_enable_sleep:
        message = "engines that generate during training cannot sleep"
        fix = "leave --vllm_enable_sleep out"
        yield problem(("async_train", "vllm_enable_sleep"), message, fix)


@check
def interrupted_answers_are_trained(config: PPOConfig) -> Problems:
    flags = config.asynchrony
    if not flags.partial_rollout:
        return
    if config.asynchrony.staleness_bound == 0:
        message = "an interrupted answer continues under newer weights: its first tokens are stale"
        yield problem(("partial_rollout", "max_staleness"), message, "--max_staleness 1")
    if flags.partial_rollout_cache == "keep":
        fix = "--partial_rollout_cache refill"
        losers = in_use(config, "vllm_enable_sleep", rollout_backend="hf", lora_sync="adapter")
        for name in losers:
            message = "only vLLM can keep keys and values, but not through sleep or a new adapter"
            yield problem(("partial_rollout_cache", name), message, fix)
        message = "the trainer cannot recompute log-probs of mixed weights, so ratios are biased"
        yield warning(("partial_rollout_cache",), message, fix)


@check
def one_number_of_running_prompts(config: PPOConfig) -> Problems:
    flags = ("oversample_ratio", "vllm_generate_batch_size")
    size = config.collecting.vllm_generate_batch_size
    if config.asynchrony.oversample_ratio > 1 and size is not None:
        yield problem(flags, "both set how many prompts run at a time", "leave one out")


@check
def surplus_groups_fit_the_scheduler(config: PPOConfig) -> Problems:
    users = off_policy_flags(config)
    if users and config.collecting.rollout_scheduler == "batch":
        message = "the batch scheduler waits for every group, so none is left over"
        yield problem((*users, "rollout_scheduler"), message, "--rollout_scheduler stream")
    surplus = off_policy_flags(config)
    refused = config.debug.full_determinism or config.collecting.rollout_scheduler == "batch"
    if surplus and not config.asynchrony.carries_over and not refused:
        message = "the slowest groups, with the longest answers, are dropped, favouring short ones"
        yield warning(surplus, message, "--partial_rollout continues them")


@check
def equal_runs_train_on_equal_answers(config: PPOConfig) -> Problems:
    """The speed of the engines must not decide what is trained on."""
    in_step = config.asynchrony.async_train and config.asynchrony.staleness_bound == 0
    users = [name for name in off_policy_flags(config) if not (in_step and name == "async_train")]
    if users and config.debug.full_determinism:
        fix = "--max_staleness 0" if users == ["async_train"] else "leave one out"
        message = "the engines' speed decides which weights sample an answer, so runs differ"
        yield problem((*users, "full_determinism"), message, fix)


@check
def older_rollouts_are_corrected(config: PPOConfig) -> Problems:
    correction, interval = config.correction, config.engine.weight_sync_interval
    age = config.asynchrony.staleness_bound * interval + interval - 1
    if age and not correction.enable_vllm_is_correction and correction.skip_old_logprob != "always":
        flags = in_use(config, "async_train", "partial_rollout")
        flags += ("weight_sync_interval",) if interval > 1 else ()
        message = (
            f"rollouts are up to {counted(age, 'step')} old, but losses are not corrected for this"
        )
        yield warning(flags, message, "--enable_vllm_is_correction")
