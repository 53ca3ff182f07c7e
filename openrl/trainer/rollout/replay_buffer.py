"""Groups of earlier steps that are trained on again, mixed with the new ones of a step.

A replayed group keeps its tokens, the engine's log-probs of them and the versions that sampled
them, so it is nothing but a group with older versions: ages, importance weights and rejections
treat it as they treat what was played ahead. Its rewards are as they were. Its advantages are
computed anew with the batch that it joins: those of a baseline within the group do not change by
that, and estimators that normalise over a batch have one scale for all of its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any

from openrl.config.groups.replay import ReplayFlags
from openrl.metrics import Last, Mean, Metric, Sum
from openrl.trace.record import group_from_json, group_to_json
from openrl.types import Prompt, PromptGroup


@dataclass
class ReplayableGroup:
    """A group that waits to be trained on again."""

    group: PromptGroup
    version: int  # the oldest weights that sampled a token of it
    uses: int = 0  # how often it was trained on again

    @property
    def signal(self) -> float:
        """The standard deviation of its rewards; the largest where several agents share an
        episode. Of answers that pass or fail it is largest where half of them pass: ExGRPO
        replays prompts of medium difficulty, too, https://arxiv.org/abs/2510.02245."""
        return max(pstdev(of_one.rewards or [0.0]) for of_one in self.group.of_agents)


class ReplayBuffer:
    """Holds groups whose rewards differ, for a bounded number of weight syncs and of uses."""

    def __init__(self, flags: ReplayFlags) -> None:
        self.flags = flags
        self.waiting: list[ReplayableGroup] = []  # in the order in which they were first trained on

    def choose(self, version: int) -> list[PromptGroup]:
        """Return the groups that join a step which trains the weights ``version``: the ones used
        least often; of these the ones with the strongest signal, then the youngest. The choice
        depends on nothing but the groups that wait, and changes nothing."""
        young = [one for one in self.waiting if not self._is_old(one, version)]
        young.sort(key=lambda one: (one.uses, -one.signal, -one.version))
        return [one.group for one in young[: self.flags.replay_groups]]

    def trained(
        self, groups: list[PromptGroup], replayed: list[PromptGroup], version: int
    ) -> dict[str, Metric]:
        """Note that a step has trained the weights ``version`` on new ``groups`` and on
        ``replayed`` ones, keep the new ones that have a signal, and let go of what is too old, was
        used often enough, or does not fit. Returns metrics."""
        again = {id(group) for group in replayed}
        used = [one for one in self.waiting if id(one.group) in again]
        for one in used:
            one.uses += 1
        self.waiting += [one for group in groups if (one := _replayable(group, version)).signal]
        left: Counter[str] = Counter()
        kept: list[ReplayableGroup] = []
        for one in self.waiting:
            reason = "used_up" if one.uses >= self.flags.replay_max_uses else ""
            if not reason and self._is_old(one, version):
                reason = "evicted_by_age"
            left[reason] += 1
            if not reason:
                kept.append(one)
        excess = max(len(kept) - self.flags.buffer_size, 0)
        oldest = sorted(range(len(kept)), key=lambda place: (kept[place].version, place))[:excess]
        self.waiting = [one for place, one in enumerate(kept) if place not in set(oldest)]
        metrics: dict[str, Metric] = {
            "replay/groups": Sum(len(used)),
            "replay/share": Mean(len(used), len(groups) + len(used)),
            "replay/waiting": Last(len(self.waiting)),
            "replay/used_up": Sum(left["used_up"]),
            "replay/evicted_by_age": Sum(left["evicted_by_age"]),
            "replay/evicted_by_size": Sum(excess),
        }
        if used:
            metrics["replay/age_mean"] = Last(fmean(version - one.version for one in used))
            metrics["replay/uses_mean"] = Last(fmean(one.uses for one in used))
        return metrics

    def _is_old(self, one: ReplayableGroup, version: int) -> bool:
        return version - one.version > self.flags.replay_max_age

    def state(self) -> list[dict[str, Any]]:
        return [vars(one) | {"group": group_to_json(one.group)} for one in self.waiting]

    def load_state(self, state: list[dict[str, Any]], known: Mapping[str, Prompt]) -> None:
        """The inverse of ``state``. ``known`` maps ids to prompts."""
        self.waiting = [
            ReplayableGroup(**saved | {"group": group_from_json(saved["group"], {**known})})
            for saved in state
        ]


def _replayable(group: PromptGroup, version: int) -> ReplayableGroup:
    """Return the group without what training does not read: turns as people see them, with their
    frames, and attempts that failed."""
    found = [t.versions.start for t in group.trajectories if t.versions]
    bare = [replace(t, rendered=()) for t in group.trajectories]
    kept = replace(group, trajectories=bare, failed_attempts=[])
    return ReplayableGroup(kept, min(found, default=version))
