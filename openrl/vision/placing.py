"""Token rows with images, for engines that expand images themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from openrl.types import PlacedImage

T = TypeVar("T")


def unexpanded(token_ids: list[int], images: Sequence[PlacedImage]) -> list[int]:
    """Return the row with the tokens of each image replaced by its placeholder."""
    kept: list[int] = []
    end = 0
    for placed in images:
        kept += [*token_ids[end : placed.start], *placed.placeholder]
        end = placed.end
    return kept + token_ids[end:]


def spread(values: list[T], images: Sequence[PlacedImage], fill: T) -> list[T]:
    """Turn one value per token of an unexpanded row into one per token of the whole row. The tokens
    of images get ``fill``."""
    found: list[T] = []
    taken = 0
    for placed in images:
        before = placed.start - len(found)
        found += [*values[taken : taken + before], *[fill] * (placed.end - placed.start)]
        taken += before + len(placed.placeholder)
    return found + values[taken:]
