"""The built-in environments. Importing this module registers all of them, and loads no third-party
library."""

# ruff: noqa: F401
from openrl.agents.environments import (
    bandit,
    calculator,
    countdown,
    frozen_lake,
    number_game,
    reasoning,
    search,
    sokoban,
)
