"""Rules of images in prompts."""

from __future__ import annotations

from openrl.config.commands import (
    AnsweringConfig,
    BatchInferenceConfig,
    EvaluateConfig,
    PPOConfig,
    ServeConfig,
    TrainingConfig,
)
from openrl.config.rules.deepspeed import asked
from openrl.flags.checks import Problems, check, problem


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
    for name in asked(config.parallel):
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
