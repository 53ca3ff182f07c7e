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
        "Most images in one prompt. 0: text only, and training leaves the vision tower unchanged.",
        bounds=">= 0",
        alias=("limit_mm_per_prompt",),
    )
    image_min_pixels: int | None = flag(
        None,
        "Smaller images are scaled up to this many pixels, in engine and trainer alike. None:"
        " unchanged.",
        bounds="> 0",
        only_if=SEES,
    )
    image_max_pixels: int | None = flag(
        None,
        "Larger images are scaled down to this many pixels, in engine and trainer alike. None:"
        " unchanged.",
        bounds="> 0",
        only_if=SEES,
    )
    mm_processor_kwargs: dict[str, Any] = flag(
        {},
        'More arguments for the model\'s processor, in engine and trainer, e.g. {"max_pixels":'
        " 200704}.",
        only_if=SEES,
    )


@group("Vision")
class ImageFlags(PixelFlags):
    """Flags of commands that show the images of rows to a model."""

    image_key: str = flag(
        "images",
        "Column with a row's images, one for each <image> in the prompt: paths, URLs, data: URLs,"
        " bytes or image objects. Dots reach into nested columns. By default a column `image` is"
        " read too.",
        only_if=SEES,
    )
    image_dir: str | None = flag(
        None, "Directory that relative image paths start from.", only_if=SEES
    )


@group("Vision")
class VisionFlags(ImageFlags):
    """Flags of commands that train the model."""

    freeze_visual_encoder: bool = flag(
        False,
        "Train only the language model: the vision tower and its projector stay unchanged and are"
        " not sent to engines.",
        only_if=SEES,
    )
