"""Flags of rewards."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Literal

from openrl.flags.schema import Condition, flag, given, group
from openrl.flags.values import SECONDS

FailurePolicy = Literal["drop", "zero", "fail"]

TOKEN_VARIABLE = "OPENRL_RM_TOKEN"  # the bearer token of reward servers and their clients


def split(text: str | None) -> list[str]:
    """Return the items of a comma list."""
    return [item.strip() for item in (text or "").split(",") if item.strip()]


def files_and_urls(remote_rm_url: str | None) -> tuple[list[str], list[str]]:
    """Split the items of --remote_rm_url into files and URLs."""
    items = split(remote_rm_url)
    urls = [item for item in items if item.startswith(("http://", "https://"))]
    return [item for item in items if item not in urls], urls


WATCHED = given("watch_funcs")
FUNCTIONS = (
    given("reward_funcs")
    | Condition(
        lambda config: bool(files_and_urls(config.reward.remote_rm_url)[0]),
        "with a Python file in --remote_rm_url",
    )
    | WATCHED
)
SOURCES = given("reward_funcs") | given("remote_rm_url") | WATCHED

SERVERS = Condition(
    lambda config: bool(files_and_urls(config.reward.remote_rm_url)[1]),
    "with a URL in --remote_rm_url",
)


of_functions = partial(flag, only_if=FUNCTIONS)


@group("Reward")
class RewardSourceFlags:
    """Where rewards come from, whatever they are used for."""

    reward_func_kwargs: dict[str, Any] = of_functions(
        {},
        'Keyword arguments for reward functions and verifiers: {"name": {...}} for each source,'
        " or one object for all.",
        may_hold_secrets=True,
    )
    reward_num_workers: int = of_functions(
        16,
        "Most processes that run the reward function or verifier of one source, over all engines;"
        " they start when needed.",
        bounds="> 0",
    )
    reward_memory_gb: float = of_functions(
        8.0,
        "GiB of memory that one reward process, including the processes it starts, may use before"
        " it is killed.",
        bounds="(0, 1e6]",
    )
    remote_rm_url: str | None = flag(
        None,
        "External reward sources, comma separated: Python files (path.py or path.py:function),"
        " each one source, and HTTP URLs, all together one source used in rotation.",
    )
    reward_funcs: tuple[str, ...] = flag((), "Names of built-in verifiers, each one reward source.")
    reward_weights: tuple[float, ...] | None = flag(
        None,
        "Weight of each source, in this order: --reward_funcs, the files of --remote_rm_url, its"
        " URLs, --reward_pretrain. None: 1 each.",
    )
    reward_timeout: float = flag(
        180.0,
        "Seconds for one reward call, after which its process is killed or its HTTP request"
        " dropped.",
        bounds=SECONDS,
        only_if=SOURCES,
    )


@group("Reward")
class RewardFlags(RewardSourceFlags):
    reward_routing: str | None = flag(
        None,
        "YAML or JSON file {datasource: {source: weight}} that says which sources score which"
        " rows. None: every source scores every row.",
    )
    reward_max_retries: int = flag(
        5,
        "Attempts at one HTTP reward call, with growing pauses between them.",
        bounds="> 0",
        only_if=SERVERS,
    )
    reward_failure_policy: FailurePolicy = flag(
        "drop",
        "What happens to a row without a reward after all retries. drop: it is left out of"
        " training and statistics; zero: its reward is 0; fail: the run stops. It is always"
        " counted and reported.",
    )
    max_reward_failure_rate: float = flag(
        0.2,
        "Stop the run when more than this share of a batch has no reward. batch_inference and"
        " evaluate finish first, and then fail.",
        bounds="[0, 1]",
        only_if=given("reward_failure_policy", "drop", "zero"),
    )
    reward_skip_special_tokens: bool = flag(
        False,
        "Remove special tokens from the text that reward functions and servers get.",
        only_if=SOURCES,
    )


def bearer_token() -> str | None:
    """Return the token of reward servers and their clients from this process's environment."""
    return os.environ.get(TOKEN_VARIABLE, "").strip() or None
