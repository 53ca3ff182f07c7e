"""``python -m openrl.cli.trace rescore RUN``, whose flags are those of ``RescoreConfig``."""

from __future__ import annotations

from collections.abc import Sequence

from openrl.cli.run import command, of_module
from openrl.config.commands import RescoreConfig

prepare, run = of_module("openrl.inference.rescore")


def main(argv: Sequence[str]) -> int:
    """Return the exit code. The first word may be the run, without its flag."""
    named = bool(argv) and not argv[0].startswith("-")
    words = ["--run", *argv] if named else argv
    return command(RescoreConfig, prepare, run, words)
