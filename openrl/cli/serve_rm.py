"""``python -m openrl.cli.serve_rm``: rewards over HTTP."""

from __future__ import annotations

import sys

from openrl.cli.run import command, of_module
from openrl.config.commands import ServeConfig

prepare, run = of_module("openrl.inference.serve")

if __name__ == "__main__":
    sys.exit(command(ServeConfig, prepare, run, prog="serve_rm", description=__doc__ or ""))
