"""``python -m openrl.cli.train_ppo_ray``, whose flags are those of ``PPOConfig``."""

from __future__ import annotations

from typing import Any

from openrl.cli.run import command
from openrl.config.commands import PPOConfig
from openrl.errors import printable
from openrl.processes.leave import leave


def prepare(config: PPOConfig) -> Any:
    """Read and check everything that can be wrong before a process starts."""
    # heavy libraries are imported after the flags have been checked
    from openrl.trainer.planning.prepare import prepare

    return prepare(config)


def run(config: PPOConfig, inputs: Any) -> None:
    """Train; with --dry_run print the plan and the first prompts instead."""
    if config.debug.dry_run:
        from openrl.tracking.console import PlainConsole
        from openrl.trainer.planning.dry_run import describe
        from openrl.trainer.planning.first_row import print_prompts
        from openrl.workers.roles import agent_setup

        print(printable(describe(config, inputs)))
        told = (p for p in [*inputs.prompts, *inputs.eval_prompts] if p.token_ids)  # no seeds
        print_prompts(PlainConsole(), told, agent_setup(config), inputs.tokenizer)
        return
    import asyncio

    from openrl.trainer.launch import train

    asyncio.run(train(config, inputs))


if __name__ == "__main__":
    leave(command(PPOConfig, prepare, run))
