"""Flags of the replay buffer: groups of earlier steps that are trained on again."""

from __future__ import annotations

from functools import partial

from openrl.config.groups.asynchrony import TRAINS
from openrl.flags.schema import flag, given, group

of_replays = partial(flag, only_if=(TRAINS, given("replay_groups")))


@group("Replay")
class ReplayFlags:
    replay_groups: int = flag(
        0,
        "Groups of earlier steps that join the new ones of each step, as far as there are any;"
        " only groups whose rewards differ. They are not played again. 0: none.",
        bounds=">= 0",
        only_if=TRAINS,
    )
    replay_max_age: int = of_replays(
        4,
        "Most weight syncs between sampling the oldest token of a group and training on it again.",
        bounds="> 0",
    )
    replay_max_uses: int = of_replays(
        1, "How often a group is trained on again at most.", bounds="> 0"
    )
    replay_buffer_size: int | None = of_replays(
        None,
        "Groups that are kept for replay at most, in memory and in checkpoints; the oldest leave"
        " first. None: replay_groups * replay_max_age, as many as join before they are too old.",
        bounds="> 0",
    )

    @property
    def buffer_size(self) -> int:
        return self.replay_buffer_size or self.replay_groups * self.replay_max_age
