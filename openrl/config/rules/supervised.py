"""Rules of the commands that train one model on given rows."""

from __future__ import annotations

from openrl.config.commands import DPOConfig, RMConfig, SFTConfig
from openrl.flags.checks import Problem, Problems, check


@check
def turns_come_from_the_chat_template(config: SFTConfig) -> Problems:
    data = config.data
    if data.multiturn and data.pretrain_mode:
        yield Problem(("multiturn", "pretrain_mode"), "plain text has no turns", "leave one out")
    elif data.multiturn and not config.templates.apply_chat_template:
        message = "only a chat template says where a turn begins and ends"
        yield Problem(("multiturn", "apply_chat_template"), message, "--apply_chat_template")


@check
def evaluation_has_its_time(config: SFTConfig | DPOConfig) -> Problems:
    if config.evaluation.eval_dataset is not None and config.evaluation.eval_steps == -1:
        flags = ("eval_dataset", "eval_steps")
        yield Problem(flags, "the evaluation never runs", "--eval_steps 10", fatal=False)


@check
def margins_go_into_the_sigmoid(config: RMConfig) -> Problems:
    if config.reward_loss.margin_loss and config.reward_loss.loss != "sigmoid":
        yield Problem(("margin_loss", "loss"), "logexp does not support margins", "--loss sigmoid")


@check
def rated_answers_have_prompts(config: DPOConfig) -> Problems:
    if (
        config.preference.rated
        and config.data.prompt_key is None
        and not config.templates.apply_chat_template
    ):
        message = (
            "rated answers are compared with answers to other prompts, so the prompt must be known"
        )
        yield Problem(
            ("loss", "prompt_key"),
            message,
            "--prompt_key COLUMN, or chat lists with --apply_chat_template",
        )
