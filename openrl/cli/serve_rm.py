"""``python -m openrl.cli.serve_rm``, whose flags are those of ``ServeConfig``."""

from __future__ import annotations

from openrl.cli.run import command, of_module
from openrl.config.commands import ServeConfig
from openrl.processes.leave import leave

prepare, run = of_module("openrl.inference.serve")

if __name__ == "__main__":
    leave(command(ServeConfig, prepare, run))
