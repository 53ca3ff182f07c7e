"""Rules of data, images, evaluation and checkpoints."""

from __future__ import annotations

from openrl.config.commands import (
    AnsweringConfig,
    BatchInferenceConfig,
    DPOConfig,
    EvaluateConfig,
    PPOConfig,
    RMConfig,
    ServeConfig,
    SFTConfig,
    SupervisedConfig,
    TrainingConfig,
)
from openrl.config.derived import splitting_flags
from openrl.config.groups.data import JINJA_SUFFIXES, data_items, probabilities
from openrl.flags.checks import Given, Problems, check, in_use, problem, warning


@check
def template_has_a_place(config: TrainingConfig | AnsweringConfig) -> Problems:
    template = config.templates.input_template
    if template is None or template.endswith(JINJA_SUFFIXES):
        return
    if "{}" not in template:
        message = f"{template!r} has no {{}} where the prompt goes"
        yield problem(("input_template",), message, "add {}")
    if "\\n" in template:
        message = "contains a backslash and n; a line break may be meant"
        yield warning(("input_template",), message, "$'...\\n...' in bash")


@check
def there_are_prompts(config: PPOConfig | EvaluateConfig) -> Problems:
    idle = isinstance(config, PPOConfig) and config.evaluation.eval_only
    others = config.environments.env_tags or idle
    if config.data.prompt_data is None and not others:
        yield problem(("prompt_data",), "is required", "--prompt_data FILE")
    if config.data.prompt_data is not None and config.environments.env_tags:
        message = "prompts come either from environments or from data"
        yield problem(("env_tags", "prompt_data"), message, "leave one out")


@check
def environments_make_what_is_evaluated(config: PPOConfig) -> Problems:
    if config.evaluation.eval_dataset is not None and config.environments.env_tags:
        message = "an evaluation plays the same environments, with seeds of its own"
        yield problem(("env_tags", "eval_dataset"), message, "leave --eval_dataset out")


@check
def probabilities_match_data(config: TrainingConfig | AnsweringConfig) -> Problems:
    flag = "dataset" if isinstance(config, SupervisedConfig) else "prompt_data"
    names, text = getattr(config.data, flag), getattr(config.data, f"{flag}_probs")
    if names is None or text is None:
        return
    items = len(data_items(names))
    fix = f"--{flag}_probs {','.join(['1'] * items)}"
    try:
        found = len(probabilities(text))
    except ValueError as error:
        message = f"{text!r} is not a comma list of positive numbers: {error}"
        yield problem((f"{flag}_probs",), message, fix)
        return
    if found != items:
        message = f"{found} probabilities for {items} dataset{'s' if items > 1 else ''}"
        yield problem((f"{flag}_probs", flag), message, fix)


@check
def evaluation_has_rows_and_a_time(config: PPOConfig, given: Given) -> Problems:
    evaluation, count = config.evaluation, config.evaluation.eval_n_samples_per_prompt
    rows = evaluation.eval_dataset is not None
    if not rows and not config.environments.env_tags:
        if evaluation.eval_only:
            message = "there is nothing to evaluate"
            yield problem(("eval_only", "eval_dataset"), message, "--eval_dataset FILE")
        return
    if rows and not evaluation.asked_for and "eval_steps" not in given:
        yield from never_evaluates()
    if evaluation.eval_temperature == 0 and count > 1:
        flags = ("eval_temperature", "eval_n_samples_per_prompt")
        message = f"greedy decoding gives {count} equal answers"
        yield problem(flags, message, "--eval_n_samples_per_prompt 1")


@check
def evaluation_has_a_time(config: SupervisedConfig, given: Given) -> Problems:
    evaluation = config.evaluation
    if evaluation.eval_dataset and evaluation.eval_steps == -1 and "eval_steps" not in given:
        yield from never_evaluates()


def never_evaluates() -> Problems:
    flags = ("eval_dataset", "eval_steps")
    yield warning(flags, "the evaluation never runs", "--eval_steps 10")


@check
def checkpoints_have_a_start_and_content(config: TrainingConfig) -> Problems:
    names = in_use(config, "load_checkpoint", "resume_from_checkpoint", "overwrite_ckpt")
    if len(names) > 1:
        message = "these contradict each other: a run has one starting point"
        yield problem(names, message, "leave one out")
    flags = config.checkpoint
    if flags.disable_ds_ckpt and flags.save_steps > 0 and not flags.save_hf_ckpt:
        message = "checkpoints would be empty"
        yield problem(("disable_ds_ckpt", "save_steps"), message, "--save_hf_ckpt")


# -- train_sft, train_rm and train_dpo -------------------------------------------------------------


@check
def turns_come_from_the_chat_template(config: SFTConfig) -> Problems:
    data = config.data
    if data.multiturn and data.pretrain_mode:
        yield problem(("multiturn", "pretrain_mode"), "plain text has no turns", "leave one out")
    elif data.multiturn and not config.templates.apply_chat_template:
        message = "only a chat template says where a turn begins and ends"
        yield problem(("multiturn", "apply_chat_template"), message, "--apply_chat_template")


@check
def margins_go_into_the_sigmoid(config: RMConfig) -> Problems:
    if config.reward_loss.margin_loss and config.reward_loss.loss != "sigmoid":
        yield problem(("margin_loss", "loss"), "logexp does not support margins", "--loss sigmoid")


@check
def rated_answers_have_prompts(config: DPOConfig) -> Problems:
    known = config.data.prompt_key is not None or config.templates.apply_chat_template
    if config.preference.rated and not known:
        message = (
            "rated answers are compared with answers to other prompts, so the prompt must be known"
        )
        fix = "--prompt_key COLUMN, or chat lists with --apply_chat_template"
        yield problem(("loss", "prompt_key"), message, fix)


# -- images ----------------------------------------------------------------------------------------


@check
def images_stand_in_chats(config: TrainingConfig | AnsweringConfig) -> Problems:
    if config.vision.max_images_per_prompt and not config.templates.apply_chat_template:
        message = "only the model's chat template can place images"
        flags = ("max_images_per_prompt", "apply_chat_template")
        yield problem(flags, message, "--apply_chat_template")


@check
def pixels_have_a_range(config: TrainingConfig | AnsweringConfig | ServeConfig) -> Problems:
    least, most = config.vision.image_min_pixels, config.vision.image_max_pixels
    if least is not None and most is not None and least > most:
        flags = ("image_min_pixels", "image_max_pixels")
        yield problem(flags, f"{least} is more than {most}", f"--image_max_pixels {least}")


@check
def rows_with_images_stay_whole(config: TrainingConfig) -> Problems:
    if not config.vision.max_images_per_prompt:
        return
    for name in splitting_flags(config.parallel):
        message = "image features need whole rows and layers"
        yield problem((name, "max_images_per_prompt"), message, f"--{name} 1")
    if config.packing.shares_prefixes:
        message = "rows with images cannot share a prefix"
        yield problem(("prefix_grouper", "max_images_per_prompt"), message, "leave it out")


@check
def servers_are_told_texts(config: PPOConfig | EvaluateConfig) -> Problems:
    if config.vision.max_images_per_prompt and config.agents.server[0]:
        message = "environments on servers get only text, so images of prompts would be lost"
        yield problem(("agent_func_path", "max_images_per_prompt"), message, "leave one out")


@check
def towers_come_from_the_checkpoint(config: PPOConfig) -> Problems:
    if config.vision.freeze_visual_encoder and config.engine.vllm_load_format == "dummy":
        message = "the vision tower is never sent, so the engine would keep random weights for it"
        flags = ("freeze_visual_encoder", "vllm_load_format")
        yield problem(flags, message, "--vllm_load_format auto")


@check
def scoring_reads_text(config: BatchInferenceConfig) -> Problems:
    if config.task.eval_task == "rm" and config.vision.max_images_per_prompt:
        message = "reward models of this command read only text"
        flags = ("max_images_per_prompt", "eval_task")
        yield problem(flags, message, "leave --max_images_per_prompt out")
