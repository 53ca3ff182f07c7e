"""Flags of rewards."""

from __future__ import annotations

from openrl.flags.schema import flag, group


@group("Reward")
class RewardFlags:
    remote_rm_url: str | None = flag(None, "Reward source: a Python file, path.py or path.py:function.")
    reward_timeout: float = flag(60.0, "Seconds one reward call may take before it is killed.", bounds="> 0")
    reward_num_workers: int = flag(1, "Processes per engine that run the reward file.", bounds="> 0")
