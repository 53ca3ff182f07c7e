"""``python -m openrl.cli.check_model MODEL``, whose flags are those of ``CheckModelConfig``."""

from __future__ import annotations

import sys

from openrl.cli.run import command
from openrl.config.commands import CheckModelConfig
from openrl.processes.leave import leave


def prepare(config: CheckModelConfig) -> None:
    # heavy libraries are imported after the flags have been checked
    from openrl.trainer.planning import check_model

    check_model.prepare(config)


def run(config: CheckModelConfig, inputs: None) -> None:
    from openrl.trainer.planning import check_model

    check_model.run(config)


def main() -> int:
    """Return the exit code. A first word that is no flag is the model."""
    words = sys.argv[1:]
    if words and not words[0].startswith("-"):
        words = ["--pretrain", *words]
    return command(CheckModelConfig, prepare, run, words)


if __name__ == "__main__":
    leave(main())
