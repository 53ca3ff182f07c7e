"""The registries: everything that can be replaced or added without editing the package.

A registry names the modules that register the built-in entries. It imports them on first use, so
importing this module loads neither torch nor any engine. ``docs/adding.md`` shows how to add an
entry to each registry.

What openrl knows of other systems is in ``openrl/compat``, a package for each. They come to these
registries like the modules of --plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from openrl.registry import Registry

COMPAT = "openrl.compat.*"

advantage_estimators: Registry[Any] = Registry(
    "advantage_estimator",
    "openrl.algorithms.advantages",
    "openrl.algorithms.role_baselines",
    "openrl.algorithms.token_baseline",
    COMPAT,
)
policy_losses: Registry[Any] = Registry(
    "policy_loss",
    "openrl.algorithms.policy_losses",
    "openrl.algorithms.score_centering",
    "openrl.algorithms.selecting_losses",
    COMPAT,
)
policy_losses.add_names(
    "papers", {"gmpo": "geo_mean", "dapo": "ppo, with --eps_clip_low_high 0.2 0.28"}
)
preference_losses: Registry[Any] = Registry(
    "preference_loss", "openrl.algorithms.preference_losses"
)
_VERIFIERS = (
    "countdown dapo expressions judge_rubric judge_siblings layout llm_judge match numeric programs"
    " reasoning repetition"
)
verifiers: Registry[Any] = Registry(
    "verifier",
    *(f"openrl.rewards.verifiers.{module}" for module in _VERIFIERS.split()),
    f"{COMPAT}.verifiers",
)
verifiers.add_names(
    "flags",
    {"length": "--len_reward_coef, a flag", "overlong": "--overlong_buffer_len, a flag"},
)
_GAMES = "bandit calculator countdown frozen_lake number_game reasoning search sokoban"
environments: Registry[Any] = Registry(
    "environment", *(f"openrl.games.{module}" for module in _GAMES.split())
)
tool_parsers: Registry[Any] = Registry(
    "tool_parser", "openrl.agents.tools.formats", "openrl.rollout_engines.vllm_parsers"
)
trackers: Registry[Any] = Registry("tracker", "openrl.tracking.trackers")
agent_interfaces: Registry[Any] = Registry("agent_interface", "openrl.agents.files.own", COMPAT)
"""``AgentInterface`` of openrl/agents/interfaces.py."""
agent_servers: Registry[Any] = Registry("agent_server", COMPAT)
"""``AgentServer`` of openrl/agents/interfaces.py."""

# -- entries are called by the name of a system ----------------------------------------------------

config_tables: Registry[Any] = Registry("configuration of system", COMPAT)
"""``ConfigTable`` of openrl/config/importing/tables.py."""
metric_names: Registry[Mapping[str, str]] = Registry("metrics of system", COMPAT)
"""{name of a metric there: name here}. Names that both share need no entry."""
reward_signatures: Registry[Any] = Registry(
    "reward functions of system", "openrl.rewards.signatures", COMPAT
)
row_shapes: Registry[Sequence[tuple[str, ...]]] = Registry("rows of system", COMPAT)
"""(column of the prompt, column of the label, *others that tell rows apart), for each shape."""
stand_ins: Registry[Mapping[str, str]] = Registry("modules of system", COMPAT)
"""{module that its files import: module here with the same names}, where it is not installed."""
tool_files: Registry[Any] = Registry("tools of system", COMPAT)
"""``ToolFiles`` of openrl/agents/interfaces.py."""
