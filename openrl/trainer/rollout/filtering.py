"""Dynamic filtering: which groups are worth training on, how many prompts a step may try."""

from __future__ import annotations

import math

from openrl.algorithms.filtering import group_mean, keep
from openrl.config.groups.rollout_correction import DynamicFilteringFlags
from openrl.errors import UserError
from openrl.metrics import Mean, Metric, Sum
from openrl.types import PromptGroup


class DynamicFilter:
    """Accepts or rejects groups. Each rejected group is replaced by the next prompt, one for one.

    So there are never more accepted and running groups than wanted. No accepted group is thrown
    away, and a step trains on the accepted ones among the first prompts of the stream, regardless
    of the order in which they complete."""

    def __init__(
        self, flags: DynamicFilteringFlags, prompts: int, wanted: int, running: int = 0
    ) -> None:
        """``prompts``: in one pass over the data; ``wanted``: groups of a step; ``running``:
        prompts that a step starts with (0: ``wanted``)."""
        rounds = flags.dynamic_filtering_max_batches or math.inf
        self.flags, self.wanted = flags, wanted
        self.spare = max(int(min(rounds * wanted, prompts)) - max(wanted, running), 0)
        # all groups so far; None once a group had the reward part that the flag names
        self._without_part: list[PromptGroup] | None = []

    def accepts(self, group: PromptGroup) -> bool:
        """Return whether a group is worth training on. Raises UserError if no group of a whole
        batch has the part that --dynamic_filtering_key names: then the name is misspelt."""
        self._look_for_part(group)
        low, high = self.flags.dynamic_filtering_reward_range
        return keep(group, low, high, self.flags.dynamic_filtering_key)

    def _look_for_part(self, group: PromptGroup) -> None:
        key = self.flags.dynamic_filtering_key
        if self._without_part is None or group_mean(group, key) is not None:
            self._without_part = None
            return
        self._without_part.append(group)
        if key in ("score", "reward") or len(self._without_part) < self.wanted:
            return
        scores = [t.score for g in self._without_part for t in g.trajectories if t.score]
        known = ["score", "reward", *sorted({name for score in scores for name in score.parts})]
        problem = f"no reward of {self.wanted} groups has a part of that name"
        raise UserError(f"--dynamic_filtering_key {key}: {problem}", f"one of {', '.join(known)}")

    def skips(self, accepted: list[PromptGroup]) -> bool:
        """Return whether a step with these groups trains nothing."""
        few = len(accepted) < self.wanted
        return not accepted or (few and self.flags.dynamic_filtering_shortfall == "skip")

    def select_groups(
        self, accepted: list[PromptGroup], generated: list[PromptGroup]
    ) -> tuple[list[PromptGroup], dict[str, Metric]]:
        """Return the groups to train on, none to skip the step, and the filter's metrics. Raises
        UserError if too few groups were accepted and --dynamic_filtering_shortfall is to fail."""
        metrics: dict[str, Metric] = {
            "filter/generated_groups": Sum(len(generated)),
            "filter/kept_groups": Sum(len(accepted)),
            "filter/kept_share": Mean(len(accepted), len(generated)),
        }
        if len(accepted) == self.wanted or self.flags.dynamic_filtering_shortfall != "fail":
            return [] if self.skips(accepted) else accepted, metrics
        low, high = self.flags.dynamic_filtering_reward_range
        raise UserError(
            f"--dynamic_filtering: only {len(accepted)} of {self.wanted} groups have a mean"
            f" between {low:g} and {high:g} after {len(generated)} prompts",
            "easier or harder prompts, a higher --dynamic_filtering_max_batches, or"
            " --dynamic_filtering_shortfall train",
        )
