"""What train_sft, train_rm and train_dpo share: they differ in their flags alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrl.cli.run import command
from openrl.config.commands import SupervisedConfig


def prepare(config: SupervisedConfig) -> Any:
    """Read and check everything that can be wrong before anything is built."""
    # imported after the flags are known to be right
    from openrl.training.distributed import Launch

    if launch := Launch.from_environment(config.ranks.local_rank):
        # before the next import: some of its libraries ask CUDA for a device
        launch.take_own_gpu()
    from openrl.trainer.supervised.launch import prepare

    return prepare(config)


def run(config: SupervisedConfig, inputs: Any) -> None:
    """Train; with --dry_run print the plan instead."""
    import asyncio

    from openrl.trainer.supervised.launch import describe, train

    if config.debug.dry_run:
        from openrl.trainer.planning.dry_run import supervised_memory

        memory = supervised_memory(
            config, inputs.task.kind, inputs.ranks(config.ranks), inputs.device
        )
        if inputs.leads:
            print(describe(config, inputs), memory, sep="\n\n")
    else:
        asyncio.run(train(config, inputs))


def supervised_command(
    config_type: type, *, prog: str, description: str, argv: Sequence[str] | None = None
) -> int:
    """The exit code of one of these commands; ``argv`` None: the words after the program's name."""
    return command(config_type, prepare, run, prog=prog, description=description, argv=argv)
