"""From flags to a reward source."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from openrl.config.reward import RewardFlags
from openrl.errors import UserError
from openrl.rewards.base import Reward
from openrl.rewards.function import FileReward
from openrl.rewards.pool import RewardFile, RewardProcess


def build_reward(flags: RewardFlags, tokenizer: PreTrainedTokenizerBase) -> Reward | None:
    """The source that --remote_rm_url names; None if it is not given. Starts nothing before the first call."""
    if flags.remote_rm_url is None:
        return None
    file = reward_file(flags.remote_rm_url)
    return FileReward(file, tokenizer, size=flags.reward_num_workers, timeout=flags.reward_timeout)


def check_reward_source(flags: RewardFlags) -> None:
    """Raises UserError if the reward file is missing, does not import or lacks the function.

    Imports it once, in a process of its own.
    """
    if flags.remote_rm_url is None:
        return
    process = RewardProcess(reward_file(flags.remote_rm_url), flags.reward_timeout)
    try:
        process.start()
    finally:
        process.kill()


def reward_file(source: str) -> RewardFile:
    """``path.py`` or ``path.py:function``. Raises UserError if it is neither, or there is no such file."""
    path, colon, function = source.rpartition(":") if not source.endswith(".py") else (source, "", "")
    if not path.endswith(".py"):
        raise UserError(f"--remote_rm_url: {source} is not a Python file", "path.py or path.py:function")
    absolute = Path(path).expanduser().absolute()
    if not absolute.is_file():
        raise UserError(f"--remote_rm_url: there is no file {path}", f"a path from {Path.cwd()}")
    return RewardFile(absolute, function) if colon else RewardFile(absolute)
