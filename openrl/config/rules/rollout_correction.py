"""Rules about what happens to rollouts before training: correction, rejection, filtering."""

from __future__ import annotations

from openrl.config.commands import PPOConfig
from openrl.config.groups.rollout_correction import rejection_tests
from openrl.flags.checks import Given, Problem, Problems, check


@check
def rejection_tests_are_sound(config: PPOConfig) -> None:
    rejection_tests(config.correction)


@check
def icepop_is_one_type(config: PPOConfig, given: Given) -> Problems:
    flags = config.correction
    if (
        flags.use_icepop
        and "vllm_is_correction_type" in given
        and flags.vllm_is_correction_type != "icepop"
    ):
        message = f"two types of correction: icepop and {flags.vllm_is_correction_type}"
        yield Problem(("use_icepop", "vllm_is_correction_type"), message, "leave one out")


@check
def engines_log_probs_are_compared_with_others(config: PPOConfig) -> Problems:
    users = [
        name
        for name in ("enable_vllm_is_correction", "rollout_rs")
        if getattr(config.correction, name)
    ]
    if users and config.correction.skip_old_logprob == "always":
        message = (
            "the engine's log-probs replace the trainer's, so every ratio between them would be 1"
        )
        yield Problem(("skip_old_logprob", *users), message, "--skip_old_logprob auto")


@check
def correction_sees_whole_distributions(config: PPOConfig) -> Problems:
    correction, cut = config.correction, config.sampling.cuts
    users = [
        name for name in ("enable_vllm_is_correction", "rollout_rs") if getattr(correction, name)
    ]
    users += ["skip_old_logprob"] if correction.skip_old_logprob == "always" else []
    if cut and users:
        yield Problem(
            (*users, *cut),
            "the engine's log-probs are of a truncated distribution, so their ratio to the"
            " trainer's is not an importance weight",
            f"leave {' and '.join(f'--{name}' for name in cut)} out",
        )


@check
def filtering_has_groups_and_rewards(config: PPOConfig, given: Given) -> Problems:
    if not config.filtering.dynamic_filtering:
        return
    if config.batch.n_samples_per_prompt == 1:
        message = "the mean score of a single answer is never between right and wrong"
        yield Problem(
            ("dynamic_filtering", "n_samples_per_prompt"), message, "--n_samples_per_prompt 8"
        )
    if config.others.reward_pretrain is not None and "dynamic_filtering_reward_range" not in given:
        message = (
            "a reward model gives no verdicts: groups are kept only if the mean of its rewards is"
            " between 0 and 1"
        )
        flags = ("dynamic_filtering_reward_range", "reward_pretrain")
        yield Problem(
            flags,
            message,
            "--dynamic_filtering_reward_range with bounds on the model's scale",
            fatal=False,
        )
