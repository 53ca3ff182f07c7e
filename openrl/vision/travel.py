"""Groups on their way back from an engine: the driver has the images of the prompt already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from openrl.types import Group, Image, PlacedImage, Prompt

Images = tuple[PlacedImage, ...]


def without_pixels(group: Group) -> Group:
    """The group with hashes in the place of its images."""
    return _each(group, lambda images: tuple(_with(p, Image(b"", p.image.sha256)) for p in images))


def with_pixels(group: Group, prompt: Prompt) -> Group:
    """The group with the images of the prompt that it was played from, one object for each."""
    known = {placed.image.sha256: placed.image for placed in prompt.images}
    return _each(group, lambda images: tuple(_with(p, known[p.image.sha256]) for p in images))


def _with(placed: PlacedImage, image: Image) -> PlacedImage:
    return replace(placed, image=image)


def _each(group: Group, change: Callable[[Images], Images]) -> Group:
    if not group.prompt.images:
        return group
    prompt = replace(group.prompt, images=change(group.prompt.images))
    answers = {
        id(t): replace(
            t,
            prompt=prompt,
            segments=[replace(s, images=change(s.images)) for s in t.segments],
        )
        for t in group.answers
    }
    greedy = answers[id(group.greedy)] if group.greedy else None
    return Group(prompt, [answers[id(t)] for t in group.trajectories], greedy)
