"""The registries: everything that can be replaced or added without editing the package.

A registry names the modules that register the built-in entries. It imports them on first use, so
importing this module loads neither torch nor any engine. ``docs/adding.md`` shows how to add an
entry to each registry.
"""

from __future__ import annotations

from typing import Any

from openrl.registry import Registry

advantage_estimators: Registry[Any] = Registry(
    "advantage_estimator",
    "openrl.algorithms.advantages",
    elsewhere={
        "reinforce_plus_plus": "reinforce",
        "reinforce_plus_plus_baseline": "reinforce_baseline",
        "agentic_reinforce": "turn_reinforce",
        "grpo_vectorized": "grpo",
        "rloo_vectorized": "rloo",
    },
)
policy_losses: Registry[Any] = Registry(
    "policy_loss",
    "openrl.algorithms.policy_losses",
    "openrl.algorithms.selecting_losses",
    elsewhere={
        "vanilla": "ppo if it is verl's, gpg if it is ROLL's",
        "gmpo": "geo_mean",
        "dapo": "ppo, with --eps_clip_low_high 0.2 0.28",
    },
)
preference_losses: Registry[Any] = Registry(
    "preference_loss", "openrl.algorithms.preference_losses"
)
_VERIFIERS = "countdown dapo expressions layout length llm_judge match numeric programs reasoning"
verifiers: Registry[Any] = Registry(
    "verifier", *(f"openrl.rewards.verifiers.{module}" for module in _VERIFIERS.split())
)
_GAMES = "bandit calculator countdown frozen_lake number_game reasoning search sokoban"
environments: Registry[Any] = Registry(
    "environment", *(f"openrl.games.{module}" for module in _GAMES.split())
)
tool_parsers: Registry[Any] = Registry("tool_parser", "openrl.agents.tools.parsers")
trackers: Registry[Any] = Registry("tracker", "openrl.tracking.trackers")
