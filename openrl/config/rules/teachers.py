"""Rules of teachers."""

from __future__ import annotations

from openrl.config.commands import PPOConfig
from openrl.flags.checks import Problems, check, problem


@check
def teachers_can_act(config: PPOConfig) -> Problems:
    flags, algorithm = config.teacher, config.algorithm
    if not flags.used:
        return
    own = flags.teacher_self
    if own is not None and own not in ("start", "ema") and not (own.isdecimal() and int(own)):
        message = f"{own!r} is neither start nor ema nor a number of steps"
        yield problem(("teacher_self",), message, "--teacher_self start")
        return
    if own is not None and flags.teacher_pretrain is not None:
        yield problem(
            ("teacher_pretrain", "teacher_self"),
            "two teachers for every row",
            "one of them",
        )
    if own not in (None, "start") and flags.top_k == 0:
        message = "the output head of an earlier policy changes, and the policy keeps no copy of it"
        yield problem(("teacher_self", "teacher_topk"), message, "--teacher_topk 128")
    if flags.teacher_mode == "advantage" and algorithm.rl_loss_coef == 0:
        message = "the teacher's advantage acts through the policy loss, whose weight is 0"
        yield problem(("teacher_mode", "rl_loss_coef"), message, "--teacher_mode reverse_kl")


@check
def privileged_prompts_can_be_made(config: PPOConfig) -> Problems:
    flags, made = config.teacher, config.environments.env_tags
    if flags.teacher_prompt_key is None:
        if flags.teacher_self == "1":
            message = "a policy that reads what it read already agrees with itself"
            yield problem(("teacher_self",), message, "--teacher_prompt_key COLUMN")
        return
    if made:
        message = "environments make their prompts, so there is no column with a hint"
        yield problem(("teacher_prompt_key", "env_tags"), message, "--prompt_data")
