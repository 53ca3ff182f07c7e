"""The built-in environments: importing this module registers them all. It loads the standard
library only."""

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
