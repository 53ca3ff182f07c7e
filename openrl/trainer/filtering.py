"""Dynamic filtering of one step: which groups are trained on, and which prompts are tried instead
of the others."""

from __future__ import annotations

import math

from openrl.algorithms.filtering import group_mean, keep
from openrl.config.correction import DynamicFilteringFlags
from openrl.data.prompts import PromptStream
from openrl.errors import UserError
from openrl.tracking.metrics import Mean, Metric, Sum
from openrl.types import Group, Prompt


class DynamicFilter:
    """Each rejected group is replaced by the next prompt of the stream, one for one.

    So accepted groups and groups under way are never more than wanted: none is thrown away, and
    what is trained on is the accepted ones among the first prompts of the stream, whatever the
    order of arrival."""

    def __init__(
        self,
        flags: DynamicFilteringFlags,
        stream: PromptStream,
        wanted: int,
        running: int | None = None,
    ) -> None:
        """``running`` are the prompts that are tried at first, None: as many as wanted."""
        rounds = flags.dynamic_filtering_max_batches or math.inf
        self.flags, self.stream, self.wanted = flags, stream, wanted
        tries = int(min(rounds * wanted, len(stream.prompts)))
        self.left = max(
            tries - max(wanted, running or wanted), 0
        )  # prompts that may be tried instead of others
        self.without_part: (
            list[Group] | None
        ) = []  # all groups so far, until one has what is averaged

    def replace(self, group: Group) -> Prompt | None:
        """The prompt to try instead; None if the group is accepted, or as many were tried as may
        be.

        Raises UserError if a whole batch of groups lacks what --dynamic_filtering_key names: it is
        misspelt."""
        if self.judge(group) or self.left <= 0:
            return None
        self.left -= 1
        return self.stream.take(1)[0]

    def judge(self, group: Group) -> bool:
        """``accepts`` of a group that has just been generated. Raises UserError as ``replace``."""
        self._look_for_part(group)
        return self.accepts(group)

    def _look_for_part(self, group: Group) -> None:
        key = self.flags.dynamic_filtering_key
        if self.without_part is None or group_mean(group, key) is not None:
            self.without_part = None
            return
        self.without_part.append(group)
        parts = {
            name
            for g in self.without_part
            for t in g.trajectories
            if t.score
            for name in t.score.parts
        }
        if key not in ("score", "reward") and len(self.without_part) >= self.wanted:
            raise UserError(
                f"--dynamic_filtering_key {key}: no reward of {self.wanted} groups has such a part",
                f"one of {', '.join(['score', 'reward', *sorted(parts)])}",
            )

    def accepts(self, group: Group) -> bool:
        low, high = self.flags.dynamic_filtering_reward_range
        return keep(group, low, high, self.flags.dynamic_filtering_key)

    def select(self, generated: list[Group]) -> tuple[list[Group], dict[str, Metric]]:
        """The groups to train on, none to skip the step. Raises UserError if there are too few and
        that is to fail."""
        kept = [group for group in generated if self.accepts(group)]
        metrics: dict[str, Metric] = {
            "filter/generated_groups": Sum(len(generated)),
            "filter/kept_groups": Sum(len(kept)),
            "filter/kept_share": Mean(len(kept), len(generated)),
        }
        if len(kept) < self.wanted and self.flags.dynamic_filtering_shortfall == "fail":
            low, high = self.flags.dynamic_filtering_reward_range
            raise UserError(
                f"--dynamic_filtering: only {len(kept)} of {self.wanted} groups have a mean between"
                f" {low:g} and {high:g}, {len(generated)} prompts were tried",
                "easier or harder prompts, --dynamic_filtering_max_batches, or"
                " --dynamic_filtering_shortfall train",
            )
        if len(kept) < self.wanted and self.flags.dynamic_filtering_shortfall == "skip":
            kept = []
        return kept, metrics
