"""Metrics of a step's rollouts, before anything is learnt from them."""

from __future__ import annotations

from collections import Counter

from openrl.algorithms.collate import trained_mask
from openrl.algorithms.filtering import signal_metrics
from openrl.metrics import Last, Max, Mean, Metric, Min, Sum
from openrl.trainer.playing.reward_failures import failure_metrics
from openrl.types import Group, Image, Trajectory
from openrl.vision.pictures import image_size


def rollout_metrics(groups: list[Group]) -> dict[str, Metric]:
    """Return metrics of lengths, rewards and their parts, ends and zero-signal groups. A metric
    that nobody measured is absent."""
    rows = [t for g in groups for t in g.trajectories]
    lengths = [t.response_length for t in rows]
    metrics: dict[str, Metric] = {
        "rollout/samples": Sum(len(rows)),
        "rollout/untrained_samples": Sum(
            sum(not _is_trained(t, g) for g in groups for t in g.trajectories)
        ),
        "rollout/tokens": Sum(sum(lengths)),
        "rollout/prompt_length": Mean.of(t.segments[0].context_length for t in rows),
        "rollout/response_length": Mean.of(lengths),
        "rollout/response_length_max": Max(max(lengths)),
        "rollout/truncated_share": Mean.of(t.end.is_truncated for t in rows),
    }
    if versions := [v for t in rows for v in t.versions]:
        metrics["rollout/policy_version_min"] = Min(min(versions))
    others = agent_metrics(rows) | _reward_metrics(groups, rows) | failure_metrics(groups)
    return metrics | _image_metrics(groups) | end_metrics(rows) | others


def _image_metrics(groups: list[Group]) -> dict[str, Metric]:
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


def _distinct_images(group: Group) -> list[Image]:
    placed = (p for t in group.trajectories for s in t.segments for p in s.images)
    return [*{p.image.sha256: p.image for p in placed}.values()]


def agent_metrics(trajectories: list[Trajectory]) -> dict[str, Metric]:
    """Return the means of agents' own metrics, each over the trajectories that have it, and the
    mean reward of each named agent. A metric name without a namespace gets the prefix rollout/."""
    measured = [{**t.metrics, **_reward_of_agent(t)} for t in trajectories if not t.end.is_failure]
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
    ends = Counter(t.end.value for t in trajectories)
    metrics: dict[str, Metric] = {
        "rollout/replayed": Sum(sum(t.replays for t in trajectories)),
        "rollout/mixed_samples": Sum(sum(len(t.versions) > 1 for t in trajectories)),
    }
    return metrics | {f"rollout/ended_by_{end}": Sum(n) for end, n in sorted(ends.items())}


def _is_trained(trajectory: Trajectory, group: Group) -> bool:
    return any(any(trained_mask(s, trajectory, group)) for s in trajectory.segments)


def _reward_metrics(groups: list[Group], rows: list[Trajectory]) -> dict[str, Metric]:
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
    for part in sorted({name for s in scores for name in s.parts}):
        metrics[f"reward/{part}"] = Mean.of(s.parts[part] for s in scores if part in s.parts)
    return metrics
