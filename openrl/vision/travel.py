"""Groups on their way back from an engine: the driver has the images of the prompt already, and
every other one travels once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from openrl.types import Group, Image, PlacedImage, Prompt

Images = tuple[PlacedImage, ...]


def without_pixels(group: Group, prompt: Prompt) -> Group:
    """The group with hashes in the place of the images of the prompt that was sent, and one object
    for each other image: it is pickled once."""
    known = {image.sha256: Image(b"", image.sha256) for image in _images(prompt.images)}
    return _with(group, lambda image: known.setdefault(image.sha256, image))


def with_pixels(group: Group, prompt: Prompt) -> Group:
    """The group with the images of the prompt that it was played from, one object for each."""
    known = {image.sha256: image for image in _images(prompt.images)}
    return _with(group, lambda image: known.get(image.sha256, image))


def _images(placed: Images) -> Iterable[Image]:
    return (one.image for one in placed)


def _with(group: Group, change: Callable[[Image], Image]) -> Group:
    """The group with other objects for its images."""

    def changed(images: Images) -> Images:
        return tuple(replace(placed, image=change(placed.image)) for placed in images)

    prompt = replace(group.prompt, images=changed(group.prompt.images))
    for trajectory in group.answers:
        trajectory.prompt = replace(trajectory.prompt, images=changed(trajectory.prompt.images))
        for segment in trajectory.segments:
            segment.images = changed(segment.images)
    return replace(group, prompt=prompt)
