"""samples.jsonl: what the policy wrote, for people; one rollout per line."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from openrl.tracking.jsonl import JsonlWriter
from openrl.types import PromptGroup, Trajectory

MOST_FAILURES = 16  # per step


class SampleLog(JsonlWriter):
    """Keeps the first ``per_step`` rollouts of a step, one of each prompt before a second of any;
    then at most MOST_FAILURES attempts that failed and rollouts whose reward failed."""

    def __init__(self, path: Path, per_step: int, keep_until: int = -1) -> None:
        super().__init__(path, keep_until)
        self.per_step = per_step

    def log(self, step: int, groups: list[PromptGroup]) -> None:
        rows = list(_round_robin(groups))
        lost = [trajectory for group in groups for trajectory in group.failed_attempts]
        failed = [t for t in [*rows[self.per_step :], *lost] if _failure(t)]
        for trajectory in [*rows[: self.per_step], *failed[:MOST_FAILURES]]:
            self.write({"step": step, **sample_record(trajectory)})


def _round_robin(groups: list[PromptGroup]) -> Iterable[Trajectory]:
    """Return the first trajectory of each group, then the second of each, and so on."""
    return (
        t for rank in zip_longest(*(g.trajectories for g in groups)) for t in rank if t is not None
    )


def _failure(trajectory: Trajectory) -> str | None:
    """Return why there is nothing to train on: the infrastructure's reason or else the reward's."""
    return trajectory.failure or (trajectory.score.failure if trajectory.score else None)


def sample_record(trajectory: Trajectory) -> dict[str, Any]:
    """Return the readable side of a trajectory. ``reward`` and ``passed`` are None if nothing
    judged it; ``failure`` says why."""
    prompt, score = trajectory.prompt, trajectory.score
    return {
        "prompt_id": prompt.id,
        "source": prompt.source,
        "prompt": prompt.text,
        "response": trajectory.text,
        "label": prompt.label,
        "reward": score.reward if score else None,
        "parts": score.parts if score else {},
        "passed": score.passed if score else None,
        "failure": _failure(trajectory),
        "finish": trajectory.finish_reason.value,
        "tokens": trajectory.response_length,
        "turns": trajectory.turns,
        "policy_versions": list(trajectory.versions),
    }
