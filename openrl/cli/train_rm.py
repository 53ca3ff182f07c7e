"""``python -m openrl.cli.train_rm``: a reward model from pairs of answers."""

from __future__ import annotations

from openrl.cli.supervised import supervised_command
from openrl.config.commands import RMConfig
from openrl.processes.leave import leave

if __name__ == "__main__":
    leave(supervised_command(RMConfig, prog="train_rm", description=__doc__ or ""))
