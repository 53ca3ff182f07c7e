"""``python -m openrl.cli.train_sft``, whose flags are those of ``SFTConfig``."""

from __future__ import annotations

from openrl.cli.run import command
from openrl.cli.supervised import prepare, run
from openrl.config.commands import SFTConfig
from openrl.processes.leave import leave

if __name__ == "__main__":
    leave(command(SFTConfig, prepare, run))
