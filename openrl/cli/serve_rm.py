"""``python -m openrl.cli.serve_rm``: rewards over HTTP."""

from __future__ import annotations

import sys
from typing import Any

from openrl.cli.run import command
from openrl.config.commands import ServeConfig


def prepare(config: ServeConfig) -> Any:
    """Read and check everything that can be wrong before the model is loaded."""
    # imported after the flags have been checked
    from openrl.inference.serve import prepare_server

    return prepare_server(config)


def run(config: ServeConfig, inputs: Any) -> None:
    """Answer until SIGTERM."""
    import asyncio

    from openrl.inference.serve import run_server

    asyncio.run(run_server(config, inputs))


if __name__ == "__main__":
    sys.exit(command(ServeConfig, prepare, run, prog="serve_rm", description=__doc__ or ""))
