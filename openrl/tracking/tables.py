"""Tables of answers for trackers: what the policy wrote, with the pictures that it saw."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from itertools import chain, islice, zip_longest
from typing import Any

from openrl.types import PromptGroup, Trajectory

COLUMNS = ("prompt", "response", "label", "reward", "passed", "finish", "tokens", "failure")
MOST_PICTURES = 8


@dataclass(frozen=True)
class AnswerTable:
    """Some answers of a step or an evaluation. A cell is a text, a number or None."""

    name: str  # rollouts or evaluation
    rows: list[list[Any]]  # in the order of COLUMNS
    pictures: list[bytes]  # encoded, like image files

    @classmethod
    def of(cls, name: str, groups: list[PromptGroup], count: int) -> AnswerTable:
        """Return the table of ``count`` answers, one of each prompt before a second of any, and of
        the first pictures among them."""
        turns = zip_longest(*(group.trajectories for group in groups))
        played = [t for t in chain.from_iterable(turns) if t is not None]
        shown = list(islice(played, count))
        placed = (image for t in shown for segment in t.segments for image in segment.images)
        pictures = {p.image.sha256: p.image.data for p in placed if p.image.data}
        return cls(name, [*map(_row, shown)], list(pictures.values())[:MOST_PICTURES])

    def markdown(self) -> str:
        """Return the table as markdown, in which no text of a cell acts."""
        lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
        lines += ["| " + " | ".join(map(_as_text, row)) + " |" for row in self.rows]
        return "\n".join(lines)

    def opened(self) -> list[Any]:
        """Return the pictures as PIL images."""
        from PIL import Image

        return [Image.open(BytesIO(data)).convert("RGB") for data in self.pictures]


def _row(trajectory: Trajectory) -> list[Any]:
    prompt, score = trajectory.prompt, trajectory.score
    judged = (score.reward, score.passed) if score and not score.dropped else (None, None)
    label = None if prompt.label is None else str(prompt.label)
    ended = trajectory.finish_reason.value
    cells = (prompt.text, trajectory.text, label, *judged)
    return [*cells, ended, trajectory.response_length, trajectory.any_failure]


def _as_text(cell: Any) -> str:
    """Return a cell whose marks of markdown and HTML are escaped, on one line."""
    text = "" if cell is None else f"{cell:g}" if isinstance(cell, float) else str(cell)
    escaped = "".join(f"\\{c}" if c in "\\`*_{}[]()#+-.!|~>" else c for c in text)
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace("\n", "<br>")
