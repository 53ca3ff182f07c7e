"""Rows that got no reward: they are counted and shown, and too many of them stop the run."""

from __future__ import annotations

from openrl.errors import UserError
from openrl.metrics import Mean, Metric, Sum
from openrl.rewards.combined import row_lines
from openrl.types import Group, Trajectory

SHOWN = 3  # failed rows of a batch that are shown


def failed_rewards(groups: list[Group]) -> list[Trajectory]:
    """Return the trajectories whose reward failed. If the reward of a group's greedy answer failed,
    that is all trajectories of the group, since they lack their baseline."""
    return [
        trajectory
        for group in groups
        for trajectory in group.trajectories
        if _failure(trajectory) or (group.greedy is not None and _failure(group.greedy))
    ]


def _failure(trajectory: Trajectory) -> str | None:
    return trajectory.score.failure if trajectory.score else None


def failure_metrics(groups: list[Group]) -> dict[str, Metric]:
    """Return counts of the rows without a reward and of those whose reward took more than one call.
    Empty if nothing was scored."""
    scored = [t for group in groups for t in group.trajectories if t.score]
    if not scored:
        return {}
    failures = len(failed_rewards(groups))
    return {
        "reward/failures": Sum(failures),
        "reward/failure_rate": Mean(failures, len(scored)),
        "reward/retried": Sum(sum(t.score.attempts > 1 for t in scored if t.score)),
    }


def failure_notes(groups: list[Group]) -> list[str]:
    """Describe the first few rows without a reward, for people to read."""
    failed, notes = failed_rewards(groups), []
    for t in failed[:SHOWN]:
        why = f"no reward: {_failure(t) or 'that of the greedy answer'}"
        notes.append("\n".join([why, *row_lines(t)]))
    if len(failed) > SHOWN:
        notes.append(f"{len(failed) - SHOWN} more rows without a reward")
    return notes


class FailureGuard:
    """Watches the groups of a batch as they arrive, and stops the run as soon as too many rows have
    no reward. So a dead server is not queried for a whole data set."""

    def __init__(self, rows: int, most: float) -> None:
        self.rows, self.most = rows, most
        self.failed: list[Group] = []

    def __call__(self, group: Group) -> None:
        """Take note of a group. Raises UserError, with example rows, once more than the share
        ``most`` of the batch has no reward."""
        if not failed_rewards([group]):
            return
        self.failed.append(group)
        count = len(failed_rewards(self.failed))
        if count > self.most * self.rows:
            flag = "--max_reward_failure_rate"
            problem = (
                f"{count} of {self.rows} rows have no reward, more than {flag} {self.most:g} allows"
            )
            message = "\n".join([problem, *failure_notes(self.failed)])
            raise UserError(message, f"fix the reward, or raise {flag}")
