"""``python -m openrl.cli.train_sft``: supervised fine-tuning."""

from __future__ import annotations

from openrl.cli.supervised import supervised_command
from openrl.config.commands import SFTConfig
from openrl.processes.leave import leave

if __name__ == "__main__":
    leave(supervised_command(SFTConfig, prog="train_sft", description=__doc__ or ""))
