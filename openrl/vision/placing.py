"""Token rows with images, as an engine takes them that expands images itself."""

from __future__ import annotations

from collections.abc import Sequence

from openrl.types import PlacedImage


def unexpanded(token_ids: list[int], images: Sequence[PlacedImage]) -> list[int]:
    """The row with placeholders in the place of its images' tokens."""
    kept: list[int] = []
    end = 0
    for placed in images:
        kept += [*token_ids[end : placed.start], *placed.placeholder]
        end = placed.end
    return kept + token_ids[end:]
