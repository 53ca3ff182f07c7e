"""A row of tokens of an episode, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from openrl.types import Image, Segment


@dataclass(eq=False)
class TextRow:
    """A segment that grows, and its text."""

    text: str = ""
    segment: Segment = field(default_factory=Segment)
    rewards: dict[int, float] = field(default_factory=dict)  # by index of a turn's last token
    busy: bool = False  # a reply that continues the row is being sampled

    @property
    def images(self) -> list[Image]:
        return [placed.image for placed in self.segment.images]

    def is_continued_by(self, text: str, images: Sequence[Image]) -> bool:
        """Whether a chat with this text and these images continues the row."""
        known = self.images
        return text.startswith(self.text) and list(images[: len(known)]) == known

    def as_context(self) -> TextRow:
        """Return a row that begins with the tokens of this one, none of which is trained."""
        row = TextRow(self.text)
        row.segment.observe(self.segment.token_ids, self.segment.images)
        row.segment.privileged = self.segment.privileged
        return row
