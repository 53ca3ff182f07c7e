"""Dynamic filtering: which groups are worth training on, and how many prompts may be tried."""

from __future__ import annotations

import math

from openrl.algorithms.filtering import group_mean, keep
from openrl.config.correction import DynamicFilteringFlags
from openrl.errors import UserError
from openrl.tracking.metrics import Mean, Metric, Sum
from openrl.types import Group


class DynamicFilter:
    """Each group that is turned down is replaced by the next prompt, one for one.

    So accepted groups and groups under way are never more than wanted: none is thrown away, and
    what is trained on is the accepted ones among the first prompts of the stream, whatever the
    order of arrival."""

    def __init__(
        self, flags: DynamicFilteringFlags, prompts: int, wanted: int, running: int = 0
    ) -> None:
        """``prompts`` of one pass over the data, ``wanted`` groups of a step, ``running`` prompts
        that are tried at first (0: as wanted)."""
        rounds = flags.dynamic_filtering_max_batches or math.inf
        self.flags, self.wanted = flags, wanted
        self.spare = max(int(min(rounds * wanted, prompts)) - max(wanted, running), 0)
        self._without_part: list[Group] | None = []  # all groups so far, until one has the part

    def accepts(self, group: Group) -> bool:
        """Raises UserError if a whole batch of groups lacks what --dynamic_filtering_key names: it
        is misspelt."""
        self._look_for_part(group)
        low, high = self.flags.dynamic_filtering_reward_range
        return keep(group, low, high, self.flags.dynamic_filtering_key)

    def _look_for_part(self, group: Group) -> None:
        key = self.flags.dynamic_filtering_key
        if self._without_part is None or group_mean(group, key) is not None:
            self._without_part = None
            return
        self._without_part.append(group)
        parts = {
            name
            for g in self._without_part
            for t in g.trajectories
            if t.score
            for name in t.score.parts
        }
        if key not in ("score", "reward") and len(self._without_part) >= self.wanted:
            raise UserError(
                f"--dynamic_filtering_key {key}: no reward of {self.wanted} groups has such a part",
                f"one of {', '.join(['score', 'reward', *sorted(parts)])}",
            )

    def checked(
        self, accepted: list[Group], generated: list[Group]
    ) -> tuple[list[Group], dict[str, Metric]]:
        """The groups to train on, none to skip the step, and what was turned down. Raises UserError
        if there are too few and that is to fail."""
        metrics: dict[str, Metric] = {
            "filter/generated_groups": Sum(len(generated)),
            "filter/kept_groups": Sum(len(accepted)),
            "filter/kept_share": Mean(len(accepted), len(generated)),
        }
        shortfall = self.flags.dynamic_filtering_shortfall
        if len(accepted) == self.wanted or shortfall == "train":
            return accepted, metrics
        if shortfall == "skip":
            return [], metrics
        low, high = self.flags.dynamic_filtering_reward_range
        raise UserError(
            f"--dynamic_filtering: only {len(accepted)} of {self.wanted} groups have a mean between"
            f" {low:g} and {high:g}, {len(generated)} prompts were tried",
            "easier or harder prompts, --dynamic_filtering_max_batches, or"
            " --dynamic_filtering_shortfall train",
        )
