"""``python -m openrl.cli.train_dpo``, whose flags are those of ``DPOConfig``."""

from __future__ import annotations

from openrl.cli.run import command
from openrl.cli.supervised import prepare, run
from openrl.config.commands import DPOConfig
from openrl.processes.leave import leave

if __name__ == "__main__":
    leave(command(DPOConfig, prepare, run))
