"""What the kept answers to each prompt show, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from openrl.trace.index import Columns


@dataclass
class PlayedInStep:
    """The answers to a prompt in one step."""

    rewards: list[float] = field(default_factory=list)  # of those that have one
    verdicts: list[float] = field(default_factory=list)
    answers: int = 0
    filtered: bool = False  # --dynamic_filtering turned the group down

    @property
    def text(self) -> str:
        """The right ones of those with a verdict, 3/8; without verdicts the mean reward; in
        parentheses if training did not see the group."""
        if self.verdicts:
            said = f"{sum(self.verdicts):.4g}/{len(self.verdicts)}"
        else:
            said = f"{fmean(self.rewards):.4g}" if self.rewards else "?"
        return f"({said})" if self.filtered else said


def histories(columns: Columns, rows: Sequence[int]) -> dict[str, dict[int, PlayedInStep]]:
    """Return prompt -> training step -> what was played there, among these rows of an index.
    Prompts come in the order of ``rows``. Evaluations, replays of earlier steps, greedy answers and
    failed attempts are left out."""
    found: dict[str, dict[int, PlayedInStep]] = {}
    for row in rows:
        if columns["tag"][row] in ("evaluation", "replayed") or columns["role"][row] != "answer":
            continue
        steps = found.setdefault(columns["prompt_id"][row], {})
        played = steps.setdefault(columns["step"][row], PlayedInStep())
        played.answers += 1
        played.filtered |= columns["tag"][row] == "filtered"
        for into, name in ((played.rewards, "reward"), (played.verdicts, "passed")):
            if (value := columns[name][row]) is not None:
                into.append(value)
    return {prompt: dict(sorted(steps.items())) for prompt, steps in found.items()}
