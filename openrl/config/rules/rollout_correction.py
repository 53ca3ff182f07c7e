"""Rules about what happens to rollouts before training: correction, rejection, filtering."""

from __future__ import annotations

from openrl.config.commands import PPOConfig
from openrl.config.groups.rollout_correction import rejection_tests
from openrl.flags.checks import Given, Problems, check, in_use, problem, warning


@check
def rejection_tests_are_sound(config: PPOConfig) -> None:
    rejection_tests(config.correction)


@check
def icepop_is_one_type(config: PPOConfig, given: Given) -> Problems:
    flags = config.correction
    other = flags.vllm_is_correction_type
    if flags.use_icepop and "vllm_is_correction_type" in given and other != "icepop":
        message = f"two types of correction: icepop and {other}"
        yield problem(("use_icepop", "vllm_is_correction_type"), message, "leave one out")


@check
def log_probs_can_be_compared(config: PPOConfig) -> Problems:
    """Corrections and tests compare the engine's log-probs with the trainer's."""
    flags, cut = config.correction, config.sampling.cuts
    replaced = flags.skip_old_logprob == "always"
    users = in_use(config, "enable_vllm_is_correction", "rollout_rs")
    if users and replaced:
        message = "both would be the engine's log-probs, so every ratio between them would be 1"
        yield problem(("skip_old_logprob", *users), message, "--skip_old_logprob auto")
    users += ("skip_old_logprob",) if replaced else ()
    if cut and users:
        message = "the engine's distribution is truncated: its ratio is not an importance weight"
        fix = f"leave {' and '.join(f'--{name}' for name in cut)} out"
        yield problem((*users, *cut), message, fix)


@check
def filtering_has_groups_and_rewards(config: PPOConfig, given: Given) -> Problems:
    if not config.filtering.dynamic_filtering:
        return
    if config.batch.n_samples_per_prompt == 1:
        message = "the mean score of a single answer is never between right and wrong"
        names = ("dynamic_filtering", "n_samples_per_prompt")
        yield problem(names, message, "--n_samples_per_prompt 8")
    if config.others.reward_pretrain is not None and "dynamic_filtering_reward_range" not in given:
        flags = ("dynamic_filtering_reward_range", "reward_pretrain")
        message = "a reward model gives no verdicts: groups with a mean reward in (0, 1) are kept"
        fix = "--dynamic_filtering_reward_range with bounds on the model's scale"
        yield warning(flags, message, fix)
