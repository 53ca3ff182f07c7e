"""How a process ends: quickly, without tearing down the libraries that it has loaded, and without
an error when nobody reads what it prints any more."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End the process with this exit code, as ``sys.exit`` does, but wait for no threads, and leave
    out the seconds in which Python takes apart what libraries have built.

    Under a profiler or a tracer, such as cProfile or coverage, this is ``sys.exit``: they write
    what they found when the program has returned to them."""
    if _is_traced():
        sys.exit(code)
    atexit._run_exitfuncs()
    with suppress(BrokenPipeError):  # whoever reads wants no more
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it was closed, as by >&-
            stream.flush()
    os._exit(code)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the process with 0 once nobody reads what is printed within."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # what is still in the buffer must not fail at the end of the process
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _is_traced() -> bool:
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = monitoring and any(monitoring.get_tool(number) for number in range(6))
    return bool(sys.getprofile() or sys.gettrace() or tools)
