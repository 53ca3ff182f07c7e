"""``python -m openrl.cli.evaluate``, whose flags are those of ``EvaluateConfig``."""

from __future__ import annotations

from openrl.cli.run import command, of_module
from openrl.config.commands import EvaluateConfig
from openrl.processes.leave import leave

prepare, run = of_module("openrl.inference.evaluate")

if __name__ == "__main__":
    leave(command(EvaluateConfig, prepare, run))
