"""``python -m openrl.cli.train_rm``, whose flags are those of ``RMConfig``."""

from __future__ import annotations

from openrl.cli.run import command
from openrl.cli.supervised import prepare, run
from openrl.config.commands import RMConfig
from openrl.processes.leave import leave

if __name__ == "__main__":
    leave(command(RMConfig, prepare, run))
