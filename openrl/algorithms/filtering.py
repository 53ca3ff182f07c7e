"""Filtering: which groups carry a learning signal."""

from __future__ import annotations

from openrl.types import PromptGroup, Trajectory


def value_of(trajectory: Trajectory, key: str = "score") -> float | None:
    """Return the number that filtering averages; None for a trajectory without a score or without
    the part asked for, 0 for one whose reward failed and counts as 0.

    ``score`` stands for ``passed``, or for the reward where the reward source gave no verdict;
    ``reward`` for the reward; any other key for a named part of the reward.
    """
    score = trajectory.score
    if score is None or trajectory.failed:
        return None
    if score.failure is not None:
        return score.reward
    if key == "score":
        return score.reward if score.passed is None else score.passed
    if key == "reward":
        return score.reward
    return score.parts.get(key)


def group_mean(group: PromptGroup, key: str = "score") -> float | None:
    """Return the mean of ``value_of`` over the trajectories that have one; None without any."""
    values = [v for v in (value_of(t, key) for t in group.trajectories) if v is not None]
    return sum(values) / len(values) if values else None


def keep(group: PromptGroup, low: float, high: float, key: str = "score") -> bool:
    """Return whether low < mean < high, strictly: DAPO's dynamic sampling
    (https://arxiv.org/abs/2503.14476 section 3.2). Where several agents share an episode, it is
    enough if one of them qualifies, because each is compared only with its own kind."""
    means = [group_mean(of_one, key) for of_one in group.of_agents]
    return any(mean is not None and low < mean < high for mean in means)


def signal_metrics(groups: list[PromptGroup]) -> dict[str, float]:
    """Return shares of groups in [0, 1]: all right and all wrong (by ``passed``), equal rewards,
    one scored trajectory. Agents that share an episode have a group each.

    The first two are absent when no group has a verdict on every trajectory.
    """
    if not groups:
        return {}
    groups = [of_one for group in groups for of_one in group.of_agents]
    verdicts = [g.mean_pass for g in groups if g.mean_pass is not None]
    shares = {"zero_variance": sum(g.is_flat for g in groups) / len(groups)}
    shares["single_sample"] = sum(len(g.rewards) == 1 for g in groups) / len(groups)
    if verdicts:
        shares["all_right"] = sum(v == 1 for v in verdicts) / len(verdicts)
        shares["all_wrong"] = sum(v == 0 for v in verdicts) / len(verdicts)
    return shares
