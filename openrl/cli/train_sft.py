"""``python -m openrl.cli.train_sft``: supervised fine-tuning."""

from __future__ import annotations

import sys
from typing import Any

from openrl.cli.run import command
from openrl.config.commands import SFTConfig


def prepare(config: SFTConfig) -> Any:
    """Read and check everything that can be wrong before anything is built."""
    from openrl.trainer.launch_supervised import prepare_sft  # imported after the flags are known to be right

    return prepare_sft(config)


def run(config: SFTConfig, inputs: Any) -> None:
    """Train; with --dry_run print the plan instead."""
    import asyncio

    from openrl.trainer.launch_supervised import describe_sft, train_sft

    if config.debug.dry_run:
        print(describe_sft(config, inputs))
    else:
        asyncio.run(train_sft(config, inputs))


if __name__ == "__main__":
    sys.exit(command(SFTConfig, prepare, run, prog="train_sft", description=__doc__ or ""))
