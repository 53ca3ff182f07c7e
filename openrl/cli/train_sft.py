"""``python -m openrl.cli.train_sft``: supervised fine-tuning."""

from __future__ import annotations

import sys

from openrl.cli.run import command
from openrl.config.commands import SFTConfig


def run(config: SFTConfig) -> None:
    import asyncio  # heavy libraries are imported after the flags are known to be right

    from openrl.trainer.launch_supervised import train_sft

    asyncio.run(train_sft(config))


if __name__ == "__main__":
    sys.exit(command(SFTConfig, run, prog="train_sft", description=__doc__ or ""))
