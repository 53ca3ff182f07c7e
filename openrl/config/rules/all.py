"""Importing this module registers every rule, in the order in which problems are listed, and what
is known of unknown flags."""

from __future__ import annotations

# isort: off
from openrl.config import unknown_flags  # noqa: F401
from openrl.config.importing import taking  # noqa: F401
from openrl.config.rules import rewards  # noqa: F401
from openrl.config.rules import algorithm  # noqa: F401
from openrl.config.rules import teachers  # noqa: F401
from openrl.config.rules import placement  # noqa: F401
from openrl.config.rules import asynchrony  # noqa: F401
from openrl.config.rules import rollouts  # noqa: F401
from openrl.config.rules import training  # noqa: F401
from openrl.config.rules import data  # noqa: F401
from openrl.config.rules import machine  # noqa: F401
from openrl.config.rules import inference  # noqa: F401
