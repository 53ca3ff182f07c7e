"""What the commands share that only print: how they parse their words, and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import wraps

from openrl.errors import UserError, printable
from openrl.processes.leave import reader_may_leave

Main = Callable[[Sequence[str]], int]
"""Takes the words after the command, returns the exit code."""


def words_parser(prog: str, description: str, examples: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def printing(prog: str, *errors: type[Exception]) -> Callable[[Main], Main]:
    """Return a decorator of a command's ``main``, which then returns 2 after a message for a
    UserError or one of ``errors``, and which ends without an error if nobody reads on, as in
    ``| head``."""

    caught: tuple[type[Exception], ...] = (UserError, *errors)

    def decorate(main: Main) -> Main:
        @wraps(main)
        def run(argv: Sequence[str]) -> int:
            try:
                with reader_may_leave():
                    return main(argv)
            except caught as error:
                print(printable(f"{prog}: {error}"), file=sys.stderr)
                return 2

        return run

    return decorate
