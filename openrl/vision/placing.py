"""Token rows with images, for engines that expand images themselves."""

from __future__ import annotations

from collections.abc import Sequence

from openrl.types import PlacedImage


def unexpanded(token_ids: list[int], images: Sequence[PlacedImage]) -> list[int]:
    """Return the row with the tokens of each image replaced by its placeholder."""
    kept: list[int] = []
    end = 0
    for placed in images:
        kept += [*token_ids[end : placed.start], *placed.placeholder]
        end = placed.end
    return kept + token_ids[end:]
