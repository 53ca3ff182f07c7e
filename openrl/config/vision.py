"""Flags of images in prompts."""

from __future__ import annotations

from typing import Any

from openrl.flags.schema import flag, given, group

SEES = given("max_images_per_prompt")


@group("Vision")
class PixelFlags:
    """Flags that bound what a model is shown."""

    max_images_per_prompt: int = flag(
        0,
        "Most images in one prompt. 0: text only; training leaves the vision tower as it is.",
        bounds=">= 0",
        alias=("limit_mm_per_prompt",),
    )
    image_min_pixels: int | None = flag(
        None,
        "Smaller images are scaled up to this many pixels, once for engine and trainer. None:"
        " unchanged.",
        bounds="> 0",
        only_if=SEES,
    )
    image_max_pixels: int | None = flag(
        None,
        "Larger images are scaled down to this many pixels, once for engine and trainer. None:"
        " unchanged.",
        bounds="> 0",
        only_if=SEES,
    )
    mm_processor_kwargs: dict[str, Any] = flag(
        {},
        'Further arguments of the model\'s processor, in engine and trainer, e.g. {"max_pixels":'
        " 200704}.",
        only_if=SEES,
    )


@group("Vision")
class ImageFlags(PixelFlags):
    """Flags of commands that show the images of rows to a model."""

    image_key: str = flag(
        "images",
        "Column with a row's images: paths, URLs, data: URLs, bytes or pictures of the data set,"
        " one for each <image> in the prompt. Dots reach into nested columns.",
        only_if=SEES,
    )
    image_dir: str | None = flag(
        None, "Directory put before relative paths of images.", only_if=SEES
    )


@group("Vision")
class VisionFlags(ImageFlags):
    """Flags of commands that train the model."""

    freeze_visual_encoder: bool = flag(
        False,
        "Train the language model alone: the vision tower and what joins it to the language model"
        " stay as they are, and are not sent to engines.",
        only_if=SEES,
    )
