"""Typed flags and what the commands make of them: a config, or the problems they name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openrl.config.rules.all  # noqa: F401
from openrl.config.commands import PPOConfig
from openrl.flags.parser import read_words, resolve
from openrl.flags.schema import collect_flags

PPO = "--pretrain m --prompt_data d --remote_rm_url r.py"
SFT = "--pretrain m --dataset d"
GRPO = PPO + " --advantage_estimator group_norm --n_samples_per_prompt 8"


Words = str | Sequence[str]


def settle(command_type: type, words: Words, environment: bool = False) -> tuple[Any, list[Any]]:
    """(config, problems) of a command line."""
    settings, _, problems = read_words(words.split() if isinstance(words, str) else words)
    assert not problems
    return resolve(command_type, collect_flags(command_type), settings, environment)


def ppo(words: Words) -> PPOConfig:
    """The config of train_ppo_ray; fails if anything is wrong with the flags."""
    config, problems = settle(PPOConfig, words)
    assert not problems, problems
    return config


def said(command_type: type, words: Words, environment: bool = False) -> list[str]:
    """The problems as a user reads them."""
    return [str(p) for p in settle(command_type, words, environment)[1]]
