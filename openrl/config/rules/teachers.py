"""Rules of teachers."""

from __future__ import annotations

from openrl.config.commands import PPOConfig
from openrl.config.derived import learns_without_rewards, source_kinds
from openrl.config.teacher_plan import TeacherPlan, read_teachers, teacher_plan
from openrl.errors import UserError
from openrl.flags.checks import Problems, check, problem


@check
def teachers_can_act(config: PPOConfig) -> Problems:
    flags, algorithm = config.teacher, config.algorithm
    if not flags.used:
        return
    try:
        plan = read_teachers(flags)
    except UserError as error:
        yield error
        return
    if flags.teacher_mode == "advantage" and algorithm.rl_loss_coef == 0:
        message = "the teacher's advantage acts through the policy loss, whose weight is 0"
        yield problem(("teacher_mode", "rl_loss_coef"), message, "--teacher_mode reverse_kl")
    if flags.top_k == 0:
        yield from _heads_can_be_kept(plan)


def _heads_can_be_kept(plan: TeacherPlan) -> Problems:
    """With the whole vocabulary, the policy keeps a copy of its teacher's output head."""
    flags = ("teacher_mode", "teacher_topk")
    if plan.of("server"):
        message = "a server gives no hidden states, from which the whole vocabulary follows"
        yield problem(flags, message, "--teacher_topk 20")
    elif plan.own not in (None, "start"):
        message = "the output head of an earlier policy changes, and the policy keeps no copy of it"
        yield problem(flags, message, "--teacher_topk 128")
    elif len({teacher.name for teacher in plan.teachers}) > 1:
        message = "the policy keeps the output head of one teacher only"
        yield problem(flags, message, "--teacher_topk 128")


@check
def servers_say_what_the_policy_asks(config: PPOConfig) -> Problems:
    """They give log-probs of the whole vocabulary at temperature 1, of text."""
    if not teacher_plan(config.teacher).of("server"):
        return
    name = "teacher_url" if config.teacher.teacher_url else "teacher_routing"
    sampling = config.sampling
    if sampling.temperature != 1:
        message = "a server gives the log-probs of prompts at temperature 1"
        yield problem((name, "temperature"), message, "--temperature 1, or --teacher_pretrain")
    if sampling.cuts:
        message = "a server's log-probs are of all tokens, not of those that were left to sample"
        fix = "sampling without top_p, top_k and min_p, or --teacher_pretrain"
        yield problem((name, "top_p", "top_k", "min_p"), message, fix)
    if config.vision.max_images_per_prompt:
        message = "a server is asked about tokens, which hold no images"
        yield problem((name, "max_images_per_prompt"), message, "--teacher_pretrain")


@check
def privileged_prompts_can_be_made(config: PPOConfig) -> Problems:
    flags, made = config.teacher, config.environments.env_tags
    if not flags.privileged:
        if teacher_plan(flags).every == 1:
            message = "a policy that reads what it read already agrees with itself"
            yield problem(("teacher_self",), message, "--teacher_prompt_key COLUMN")
        return
    if made:
        name = "teacher_prompt_key" if flags.teacher_prompt_key else "teacher_hindsight"
        message = "environments make their prompts, so a teacher cannot be told more in them"
        yield problem((name, "env_tags"), message, "--prompt_data")


@check
def hindsight_has_something_to_tell(config: PPOConfig) -> Problems:
    flags = config.teacher
    if not flags.used or not flags.teacher_hindsight:
        return
    if config.vision.max_images_per_prompt:
        message = "what is told in hindsight goes into prompts of text"
        names = ("teacher_hindsight", "max_images_per_prompt")
        yield problem(names, message, "--teacher_prompt_key")
    if learns_without_rewards(config) or source_kinds(config) == {"model"}:
        message = "no reward says which answers pass, or anything in words"
        yield problem(("teacher_hindsight",), message, "--remote_rm_url, or --reward_funcs")
    if "solution" in flags.teacher_hindsight and config.batch.n_samples_per_prompt == 1:
        message = "each prompt has one answer, so no other one passed"
        names = ("teacher_hindsight", "n_samples_per_prompt")
        yield problem(names, message, "--n_samples_per_prompt 8")
