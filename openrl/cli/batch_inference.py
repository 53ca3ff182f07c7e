"""``python -m openrl.cli.batch_inference``: responses or rewards for a dataset."""

from __future__ import annotations

import sys
from typing import Any

from openrl.cli.run import command
from openrl.config.commands import BatchInferenceConfig


def prepare(config: BatchInferenceConfig) -> Any:
    """Read and check everything that can be wrong before a model is loaded."""
    # imported after the flags have been checked
    from openrl.inference.batch import prepare_batch

    return prepare_batch(config)


def run(config: BatchInferenceConfig, inputs: Any) -> None:
    import asyncio

    from openrl.inference.batch import run_batch

    asyncio.run(run_batch(config, inputs))


if __name__ == "__main__":
    sys.exit(
        command(
            BatchInferenceConfig, prepare, run, prog="batch_inference", description=__doc__ or ""
        )
    )
