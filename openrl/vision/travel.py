"""Groups on their way back from an engine. The driver already has the images of the prompt; every
other image travels once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from openrl.types import Image, PlacedImage, Prompt, PromptGroup

Images = tuple[PlacedImage, ...]


def without_pixels(group: PromptGroup, prompt: Prompt) -> PromptGroup:
    """Return the group with only the hashes of the images in ``prompt``, and with one object for
    each other image, so that pickle stores it once."""
    known = {p.image.sha256: Image(b"", p.image.sha256) for p in prompt.images}
    return _with(group, lambda image: known.setdefault(image.sha256, image))


def with_pixels(group: PromptGroup, prompt: Prompt) -> PromptGroup:
    """Return the group with the images of ``prompt``, one object for each."""
    known = {placed.image.sha256: placed.image for placed in prompt.images}
    return _with(group, lambda image: known.get(image.sha256, image))


def _with(group: PromptGroup, change: Callable[[Image], Image]) -> PromptGroup:
    """Return the group with ``change`` applied to all images. Its trajectories are changed in
    place."""

    def changed(images: Images) -> Images:
        return tuple(replace(placed, image=change(placed.image)) for placed in images)

    prompt = replace(group.prompt, images=changed(group.prompt.images))
    for trajectory in group.attempts:
        trajectory.prompt = replace(trajectory.prompt, images=changed(trajectory.prompt.images))
        for segment in trajectory.segments:
            segment.images = changed(segment.images)
    return replace(group, prompt=prompt)
