"""Metrics of a step's rollouts, before anything is learnt from them. Rows that got no reward are
counted and shown, and too many of them stop the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import StatisticsError, correlation

from openrl.algorithms.collate import trained_mask
from openrl.algorithms.filtering import signal_metrics
from openrl.errors import UserError
from openrl.metrics import Last, Max, Mean, Metric, Min, Sum
from openrl.rewards.combined import row_lines
from openrl.types import Image, PromptGroup, Trajectory
from openrl.vision.pictures import image_size

SHOWN = 3  # failed rows of a batch that are shown
UNPLAYED = 8  # prompts in a row that may at least fail; a small batch may consist of broken ones


def rollout_metrics(groups: list[PromptGroup], rewarded: bool = True) -> dict[str, Metric]:
    """Return metrics of lengths, rewards, ends and zero-signal groups, as far as measured. Samples
    that the infrastructure failed have no lengths, and those that nobody scores no rewards."""
    rows = [t for g in groups for t in g.trajectories]
    sound = [t for t in rows if not t.finish_reason.is_failure]
    lengths = [t.response_length for t in sound]
    metrics: dict[str, Metric] = {
        "rollout/samples": Sum(len(rows)),
        "rollout/untrained_samples": Sum(
            sum(not _is_trained(t, g) for g in groups for t in g.trajectories)
        ),
        "rollout/tokens": Sum(sum(lengths)),
        "rollout/prompt_length": Mean.of(t.segments[0].context_length for t in sound),
        "rollout/response_length": Mean.of(lengths),
        "rollout/truncated_share": Mean.of(t.finish_reason.is_truncated for t in sound),
    }
    if lengths:
        metrics["rollout/response_length_max"] = Max(max(lengths))
    if versions := [v for t in rows for v in t.versions]:
        metrics["rollout/policy_version_min"] = Min(min(versions))
    rewards = _reward_metrics(groups, rows) if rewarded else {}
    others = agent_metrics(rows) | rewards | _part_metrics(rows)
    ends = end_metrics(rows) | failure_metrics(groups) | fault_metrics(groups)
    return metrics | _image_metrics(groups) | ends | others


def _image_metrics(groups: list[PromptGroup]) -> dict[str, Metric]:
    """Return the number of distinct images per group, their pixels, and the image tokens per
    sample. Empty if there are no images."""
    shown = [[p for s in t.segments for p in s.images] for g in groups for t in g.trajectories]
    if not any(shown):
        return {}
    different = [image for group in groups for image in _distinct_images(group)]
    sizes = [image_size(image) for image in different]
    return {
        "rollout/images": Sum(len(different)),
        "rollout/image_pixels": Sum(sum(width * height for width, height in sizes)),
        "rollout/image_tokens": Mean.of(sum(p.end - p.start for p in images) for images in shown),
    }


def _distinct_images(group: PromptGroup) -> list[Image]:
    placed = (p for t in group.trajectories for s in t.segments for p in s.images)
    return [*{p.image.sha256: p.image for p in placed}.values()]


def agent_metrics(trajectories: list[Trajectory]) -> dict[str, Metric]:
    """Return the means of agents' own metrics, each over the trajectories that have it, and the
    mean reward of each named agent. A metric name without a namespace gets the prefix rollout/."""
    measured = [
        {**t.metrics, **_reward_of_agent(t)} for t in trajectories if not t.finish_reason.is_failure
    ]
    return {
        name if "/" in name else f"rollout/{name}": Mean.of(m[name] for m in measured if name in m)
        for name in sorted({name for metrics in measured for name in metrics})
    }


def _reward_of_agent(trajectory: Trajectory) -> dict[str, float]:
    score, agent = trajectory.score, trajectory.agent
    return {f"agent/{agent}/reward": score.reward} if agent and score and not score.dropped else {}


def end_metrics(trajectories: list[Trajectory]) -> dict[str, Metric]:
    """Return how many trajectories ended in which way, how many replays infrastructure failures
    caused, and how many trajectories were sampled by several versions of the weights."""
    ends = Counter(t.finish_reason.value for t in trajectories)
    metrics: dict[str, Metric] = {
        "rollout/replayed": Sum(sum(t.replays for t in trajectories)),
        "rollout/mixed_samples": Sum(sum(len(t.versions) > 1 for t in trajectories)),
    }
    return metrics | {f"rollout/ended_by_{end}": Sum(n) for end, n in sorted(ends.items())}


def _is_trained(trajectory: Trajectory, group: PromptGroup) -> bool:
    return any(any(trained_mask(s, trajectory, group)) for s in trajectory.segments)


def _reward_metrics(groups: list[PromptGroup], rows: list[Trajectory]) -> dict[str, Metric]:
    scores = [t.score for t in rows if t.score and not t.failed]
    if not scores:
        return {}
    metrics: dict[str, Metric] = {
        "rollout/reward": Mean.of(s.reward for s in scores),
        "rollout/reward_max": Max(max(s.reward for s in scores)),
        "rollout/reward_min": Min(min(s.reward for s in scores)),
    }
    passed = [of_one.mean_pass for group in groups for of_one in group.of_agents]
    verdicts = [share for share in passed if share is not None]
    if verdicts:
        metrics["rollout/pass_rate"] = Mean.of(verdicts)
    metrics |= {
        f"rollout/{name}_groups": Last(share) for name, share in signal_metrics(groups).items()
    }
    metrics |= _reward_by_length(rows)
    return metrics


def _part_metrics(rows: list[Trajectory]) -> dict[str, Metric]:
    """Return the means of the parts of rewards, those of failed rewards too: what a judge was asked
    counts although it gave no verdict."""
    scored = [t.score.parts for t in rows if t.score and not t.finish_reason.is_failure]
    return {
        f"reward/{name}": Mean.of(parts[name] for parts in scored if name in parts)
        for name in sorted({name for parts in scored for name in parts})
    }


def _reward_by_length(rows: list[Trajectory]) -> dict[str, Metric]:
    """Return the rank correlation (Spearman) of reward and length; empty if either is constant."""
    pairs = [(t.score.reward, t.response_length) for t in rows if t.score and not t.failed]
    rewards, lengths = zip(*pairs, strict=True)
    try:
        found = correlation(ranks(rewards), ranks(lengths))
    except StatisticsError:  # all values are equal, or there is a single one
        return {}
    return {"rollout/reward_length_correlation": Last(found)}


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share the mean of their ranks."""
    first: dict[float, int] = {}
    for rank, value in enumerate(sorted(values)):
        first.setdefault(value, rank)
    counts = Counter(values)
    return [first[value] + (counts[value] - 1) / 2 for value in values]


def failed_rewards(groups: list[PromptGroup]) -> list[Trajectory]:
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


def failure_metrics(groups: list[PromptGroup]) -> dict[str, Metric]:
    """Return counts of rows without a reward and of repeated calls; empty if nothing was scored."""
    scored = [t for group in groups for t in group.trajectories if t.score]
    if not scored:
        return {}
    failures = len(failed_rewards(groups))
    return {
        "reward/failures": Sum(failures),
        "reward/failure_rate": Mean(failures, len(scored)),
        "reward/retried": Sum(sum(t.score.attempts > 1 for t in scored if t.score)),
    }


def is_unplayed(group: PromptGroup) -> bool:
    """Whether the infrastructure failed every sample of a group."""
    failed = [trajectory.finish_reason.is_failure for trajectory in group.trajectories]
    return bool(failed) and all(failed)


def failed_attempts(groups: list[PromptGroup]) -> list[Trajectory]:
    """Return every attempt at an episode that the infrastructure failed, also if the sample was
    then played again, or was one more than were wanted."""
    attempts = [t for group in groups for t in group.attempts]
    return [t for t in attempts if t.finish_reason.is_failure]


def attempt_notes(groups: list[PromptGroup]) -> list[str]:
    """Describe the first few attempts that failed, for people to read."""
    failed = failed_attempts(groups)
    notes = [f"{t.prompt.id} failed: {t.failure or t.finish_reason.value}" for t in failed[:SHOWN]]
    if len(failed) > SHOWN:
        notes.append(f"{len(failed) - SHOWN} more attempts at episodes failed")
    return notes


def fault_metrics(groups: list[PromptGroup]) -> dict[str, Metric]:
    """Return how many attempts failed in which way."""
    kinds = Counter(t.fault for t in failed_attempts(groups) if t.fault)
    return {f"rollout/failures_{kind}": Sum(count) for kind, count in sorted(kinds.items())}


def failure_notes(groups: list[PromptGroup]) -> list[str]:
    """Describe the first few rows without a reward, for people to read."""
    failed, notes = failed_rewards(groups), []
    for t in failed[:SHOWN]:
        why = f"no reward: {_failure(t) or 'that of the greedy answer'}"
        notes.append("\n".join([why, *row_lines(t)]))
    if len(failed) > SHOWN:
        notes.append(f"{len(failed) - SHOWN} more rows without a reward")
    return notes


class UnplayedMonitor:
    """Watches groups as they arrive, over all batches, and stops the run as soon as no sample of
    ``most`` prompts in a row, and at least of UNPLAYED, could be played."""

    def __init__(self, most: int) -> None:
        self.most, self.count = max(most, UNPLAYED), 0

    def __call__(self, group: PromptGroup) -> None:
        """Take note of a group. Raises UserError, with this group as an example."""
        self.count = self.count + 1 if is_unplayed(group) else 0
        if self.count >= self.most:
            problem = f"no sample of {self.count} prompts in a row could be played to its end"
            (why, *_) = attempt_notes([group])
            raise UserError(f"{problem}; {why}", "fix the failure above and restart")


class FailureMonitor:
    """Watches the groups of a batch as they arrive, and stops the run as soon as too many rows have
    no reward. So a dead reward server is not queried for a whole data set."""

    def __init__(self, rows: int, most: float) -> None:
        self.rows, self.most = rows, most
        self.failed: list[PromptGroup] = []

    def __call__(self, group: PromptGroup) -> None:
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
