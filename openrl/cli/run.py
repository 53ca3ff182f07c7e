"""What the commands share: they read the flags, run, and end with one clear message and an exit
code.

0 means done, 1 failed, 2 flags to mend (nothing was started), 130 and 143 ended by SIGINT and
SIGTERM.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import openrl.config.rules.all  # noqa: F401
from openrl.cli.hub import settle_for_cache, with_places
from openrl.config.commands import COMMANDS
from openrl.errors import Interrupted, UserError, printable
from openrl.flags.checks import as_typed
from openrl.flags.parser import UnknownFlags, load
from openrl.flags.schema import collect_flags
from openrl.lazy import loading
from openrl.processes.leave import reader_may_leave
from openrl.trainer.saving.disk import FULL

QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers' own bars obey it too
}
"""Environment that keeps libraries from disturbing the progress bar; values that the user set
stay."""


def command(
    config_type: type,
    prepare: Callable[[Any], Any],
    run: Callable[[Any, Any], None],
    argv: Sequence[str] | None = None,
) -> int:
    """Return the exit code of ``run(config, prepare(config))``, by the flags in ``argv`` or else of
    this process. --help, --dump_config and problems with flags end the process in ``load``; a
    misspelt flag ends it after ``prepare``, so that it does not hide what is wrong with models and
    data.

    A UserError, wherever it was raised, becomes one message without a traceback and the exit code 2
    while preparing, which starts nothing, or 1 afterwards. Any other exception is a defect and
    passes through.
    """
    argv = sys.argv[1:] if argv is None else argv
    prog = next(name for name, config in COMMANDS.items() if config is config_type)
    misspelt = False
    try:
        with reader_may_leave():
            config = load(config_type, argv, prog)
    except UnknownFlags as error:
        config, misspelt = error.config, True
    silence()
    # --dry_run starts nothing either, so it too exits with 2 if it refuses what it finds
    starts = not getattr(config.debug, "dry_run", False)
    started = False
    signal.signal(signal.SIGTERM, _end)
    try:
        config = with_places(config)
        if warning := settle_for_cache(config):
            print(printable(f"{prog}: warning: {warning}"), file=sys.stderr)
        with loading():
            inputs = prepare(config)
        if misspelt:
            return 2
        started = starts
        with nullcontext() if starts else reader_may_leave():
            run(config, inputs)
    except KeyboardInterrupt as ended:
        number = signal.Signals(ended.args[0] if ended.args else signal.SIGINT)
        nothing = "" if started else "\nnothing was started"
        print(f"{prog}: {number.name}: ended{nothing}", file=sys.stderr)
        return 128 + number
    except Exception as error:
        user_error = find_user_error(error)
        disk_full = isinstance(error, OSError) and error.errno in FULL
        if user_error is None and disk_full:
            user_error = UserError(str(error), "free space, then the same command")
        if user_error is None:
            raise
        message = printable(as_typed(str(user_error), collect_flags(config_type), argv))
        message = f"apart from that: {message}" if misspelt else message
        print(f"{prog}: {message}" + ("" if started else "\nnothing was started"), file=sys.stderr)
        if isinstance(user_error, Interrupted):
            return 128 + user_error.number
        return 1 if started else 2
    return 0


def of_module(home: str) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]]:
    """Return ``prepare`` and ``run`` of a module. The module loads heavy libraries, so it is
    imported only after the flags have been checked."""

    def prepare(config: Any) -> Any:
        return import_module(home).prepare(config)

    def run(config: Any, inputs: Any) -> None:
        import asyncio

        asyncio.run(import_module(home).run(config, inputs))

    return prepare, run


def _end(number: int, frame: object) -> None:
    """End the process as Ctrl-C does: by what no ``except Exception`` on the way takes for the
    failure of a row, a file or an optional package."""
    raise KeyboardInterrupt(number)


def silence() -> None:
    """Keep the noise of libraries out of the terminal, here and in processes started later."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    # it warns of a kernel for 4-bit layers at every import
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)


def find_user_error(error: BaseException) -> UserError | None:
    """Return the UserError in ``error``, its causes or, for a group, its members; None if there is
    none.

    Ray raises an instance of both its own class and the worker's, which prints the worker's
    traceback. The worker's own exception, the one wanted, is in its ``.cause``.
    """
    seen: set[int] = set()

    def innermost(e: BaseException) -> Iterator[UserError]:
        if id(e) in seen:
            return
        seen.add(id(e))
        for inner in (getattr(e, "cause", None), e.__cause__, *getattr(e, "exceptions", ())):
            if isinstance(inner, BaseException):
                yield from innermost(inner)
        if isinstance(e, UserError) and not hasattr(e, "cause"):
            yield e

    return next(innermost(error), None)
