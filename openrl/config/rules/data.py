"""Rules of data, evaluation and checkpoints."""

from __future__ import annotations

from openrl.config.commands import (
    AnsweringConfig,
    EvaluateConfig,
    PPOConfig,
    SupervisedConfig,
    TrainingConfig,
)
from openrl.config.groups.data import JINJA_SUFFIXES, data_items, probabilities
from openrl.flags.checks import Problem, Problems, check


@check
def template_has_a_place(config: TrainingConfig | AnsweringConfig) -> Problems:
    template = config.templates.input_template
    if template is None or template.endswith(JINJA_SUFFIXES):
        return
    if "{}" not in template:
        yield Problem(
            ("input_template",), f"{template!r} has no {{}} where the prompt goes", "add {}"
        )
    if "\\n" in template:
        message = "contains a backslash and n; a line break may be meant"
        yield Problem(("input_template",), message, "$'...\\n...' in bash", fatal=False)


@check
def there_are_prompts(config: PPOConfig | EvaluateConfig) -> Problems:
    idle = isinstance(config, PPOConfig) and config.evaluation.eval_only
    others = config.environments.env_tags or idle
    if config.data.prompt_data is None and not others:
        yield Problem(("prompt_data",), "is required", "--prompt_data FILE")
    if config.data.prompt_data is not None and config.environments.env_tags:
        message = "prompts come either from environments or from data"
        yield Problem(("env_tags", "prompt_data"), message, "leave one out")


@check
def probabilities_match_prompt_data(config: PPOConfig | AnsweringConfig) -> Problems:
    names = config.data.prompt_data
    if names is not None:
        yield from probability_problems("prompt_data", names, config.data.prompt_data_probs)


@check
def probabilities_match_dataset(config: SupervisedConfig) -> Problems:
    yield from probability_problems("dataset", config.data.dataset, config.data.dataset_probs)


def probability_problems(flag: str, names: str, text: str | None) -> Problems:
    """Check that probabilities match datasets. ``flag`` names the comma list of datasets,
    ``flag``_probs the list of their probabilities."""
    if text is None:
        return
    items = len(data_items(names))
    fix = f"--{flag}_probs {','.join(['1'] * items)}"
    try:
        found = len(probabilities(text))
    except ValueError as error:
        yield Problem(
            (f"{flag}_probs",), f"{text!r} is not a comma list of positive numbers: {error}", fix
        )
        return
    if found != items:
        message = f"{found} probabilities for {items} dataset{'s' if items > 1 else ''}"
        yield Problem((f"{flag}_probs", flag), message, fix)


@check
def evaluation_is_asked_for(config: PPOConfig) -> Problems:
    evaluation = config.evaluation
    if evaluation.eval_dataset is None and not config.environments.env_tags:
        if evaluation.eval_only:
            yield Problem(
                ("eval_only", "eval_dataset"), "there is nothing to evaluate", "--eval_dataset FILE"
            )
        return
    if evaluation.eval_dataset is not None and not config.evaluation.asked_for:
        flags = ("eval_dataset", "eval_steps")
        yield Problem(flags, "the evaluation never runs", "--eval_steps 10", fatal=False)
    if evaluation.eval_temperature == 0 and evaluation.eval_n_samples_per_prompt > 1:
        yield Problem(
            ("eval_temperature", "eval_n_samples_per_prompt"),
            f"greedy decoding gives {evaluation.eval_n_samples_per_prompt} equal answers",
            "--eval_n_samples_per_prompt 1",
        )


@check
def resume_or_start_fresh(config: TrainingConfig) -> Problems:
    flags = config.checkpoint
    asked = {
        "load_checkpoint": flags.load_checkpoint,
        "resume_from_checkpoint": flags.resume_from_checkpoint is not None,
        "overwrite_ckpt": flags.overwrite_ckpt,
    }
    names = tuple(name for name, wanted in asked.items() if wanted)
    if len(names) > 1:
        yield Problem(
            names, "these contradict each other: a run has one starting point", "leave one out"
        )


@check
def checkpoints_hold_something(config: TrainingConfig) -> Problems:
    flags = config.checkpoint
    if flags.disable_ds_ckpt and flags.save_steps > 0 and not flags.save_hf_ckpt:
        yield Problem(
            ("disable_ds_ckpt", "save_steps"), "checkpoints would be empty", "--save_hf_ckpt"
        )
