"""``python -m openrl.cli.train_ppo_ray``: reinforcement learning with Ray, DeepSpeed and vLLM."""

from __future__ import annotations

import sys

from openrl.cli.run import command
from openrl.config.commands import PPOConfig


def run(config: PPOConfig) -> None:
    """Read and check everything, then train; with --dry_run print the plan instead."""
    import asyncio  # heavy libraries are imported after the flags are known to be right

    from openrl.trainer.launch import train
    from openrl.trainer.prepare import prepare

    inputs = prepare(config)
    if config.debug.dry_run:
        from openrl.trainer.plan import describe

        print(describe(config, inputs))
    else:
        asyncio.run(train(config, inputs))


if __name__ == "__main__":
    sys.exit(command(PPOConfig, run, prog="train_ppo_ray", description=__doc__ or ""))
