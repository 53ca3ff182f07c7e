"""``python -m openrl.cli.train_dpo``: learning from preferences without a reward model."""

from __future__ import annotations

from openrl.cli.supervised import supervised_command
from openrl.config.commands import DPOConfig
from openrl.processes.leave import leave

if __name__ == "__main__":
    leave(supervised_command(DPOConfig, prog="train_dpo", description=__doc__ or ""))
