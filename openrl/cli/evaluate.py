"""``python -m openrl.cli.evaluate``: mean@k, pass@k and maj@k of a model."""

from __future__ import annotations

import sys
from typing import Any

from openrl.cli.run import command
from openrl.config.commands import EvaluateConfig


def prepare(config: EvaluateConfig) -> Any:
    """Read and check everything that can be wrong before a model is loaded."""
    # imported after the flags have been checked
    from openrl.inference.evaluate import prepare_evaluation

    return prepare_evaluation(config)


def run(config: EvaluateConfig, inputs: Any) -> None:
    import asyncio

    from openrl.inference.evaluate import run_evaluation

    asyncio.run(run_evaluation(config, inputs))


if __name__ == "__main__":
    sys.exit(command(EvaluateConfig, prepare, run, prog="evaluate", description=__doc__ or ""))
