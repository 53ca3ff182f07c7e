"""What train_sft, train_rm and train_dpo share: they differ only in their flags."""

from __future__ import annotations

from typing import Any

from openrl.config.commands import SupervisedConfig
from openrl.errors import printable


def prepare(config: SupervisedConfig) -> Any:
    """Read and check everything that can be wrong before anything is built."""
    # imported after the flags have been checked
    from openrl.training_engine.distributed import Launch

    if launch := Launch.from_environment(config.ranks.local_rank):
        # before the next import, because some of its libraries ask CUDA for a device
        launch.take_own_gpu()
        if launch.rank:  # rank 0 reads and checks
            return launch
    from openrl.trainer.supervised.launch import prepare

    return prepare(config)


def run(config: SupervisedConfig, inputs: Any) -> None:
    """Train; with --dry_run print the plan and the first rows instead."""
    import asyncio

    from openrl.trainer.supervised.launch import (
        SupervisedInputs,
        describe,
        serve,
        teacher_specs,
        train,
        trained_spec,
    )

    if not isinstance(inputs, SupervisedInputs):
        if not config.debug.dry_run:
            asyncio.run(serve(config, inputs))
    elif config.debug.dry_run:
        from openrl.tracking.console import PlainConsole
        from openrl.trainer.planning.dry_run import supervised_memory
        from openrl.trainer.planning.first_row import print_examples

        spec = trained_spec(config, inputs.task, inputs.device, inputs.steps)
        frozen = teacher_specs(config, inputs.task, inputs.device)
        memory = supervised_memory(config, spec, inputs.ranks(config.ranks), frozen)
        print(printable(describe(config, inputs)), memory, sep="\n\n")
        builder = inputs.task.builder
        print_examples(PlainConsole(), builder.firsts, builder.row_names, inputs.tokenizer)
    else:
        asyncio.run(train(config, inputs))
