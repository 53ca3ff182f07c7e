"""Running code that nobody has read, in a process of its own: containment, not a security boundary.

Each run is a new interpreter in a new session, with an empty environment and hard resource limits.
On Linux (x86-64, arm64) a filter of system calls refuses it children, other programs, the network,
signals to others and every change of files; it needs no privileges. ``Ran.contained`` says whether
the filter was in force. What remains: it can read what the user can read, and it shares the
machine's caches and clocks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from openrl.rewards.verifiers.base import Unavailable
from openrl.rewards.verifiers.sandbox_child import CONTAINED, NO_MEMORY

Outcome = Literal["done", "error", "timeout", "memory", "output"]
CHILD = Path(__file__).with_name("sandbox_child.py")
LONGEST_MESSAGE = 300  # bytes of standard error


@dataclass(frozen=True)
class Limits:
    seconds: float  # wall time and processor time
    memory: int  # bytes of address space
    output: int  # bytes of one file, standard output included


@dataclass(frozen=True)
class Ran:
    """How a run ended."""

    outcome: Outcome
    stdout: bytes
    result: bytes  # what the mode writes to FD_OUT; empty unless done
    message: str  # the end of standard error
    contained: bool


def run(task: dict[str, Any], limits: Limits, stdin: str = "") -> Ran:
    """Run one task of ``sandbox_child``. Raises Unavailable if no interpreter could be started."""
    resources = {
        "RLIMIT_CPU": math.ceil(limits.seconds),
        "RLIMIT_AS": limits.memory,
        "RLIMIT_FSIZE": limits.output,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }
    packages = [
        path for path in sys.path if Path(path).name == "site-packages"
    ]  # without site: it takes longer than all
    with contextlib.ExitStack() as stack:
        source, given, stdout, stderr, out = (
            stack.enter_context(tempfile.TemporaryFile()) for _ in range(5)
        )
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="openrl-"))
        _fill(
            source,
            json.dumps(task | {"limits": resources, "parent": os.getpid(), "path": packages}),
        )
        _fill(given, stdin)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(CHILD), str(source.fileno()), str(out.fileno())],
                stdin=given, stdout=stdout, stderr=stderr, pass_fds=(source.fileno(), out.fileno()), cwd=directory,
                env={"PATH": os.defpath, "HOME": directory, "LC_ALL": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise Unavailable(
                f"cannot start an interpreter for the response's code: {error}"
            ) from None
        try:
            process.wait(limits.seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            timed_out = process.poll() is None
            _end(process)
        result = _read(out, limits.output)
        return Ran(
            outcome=_outcome(
                process.returncode, timed_out, os.fstat(stdout.fileno()).st_size >= limits.output
            ),
            stdout=_read(stdout, limits.output),
            result=result[1:],
            message=_read(stderr, LONGEST_MESSAGE).decode(errors="replace"),
            contained=result[:1] == CONTAINED,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all that is left of its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outcome(status: int, timed_out: bool, full: bool) -> Outcome:
    if timed_out or status == -signal.SIGXCPU:
        return "timeout"
    if status == 0:
        return "done"
    if full or status == -signal.SIGXFSZ:
        return "output"
    return "memory" if status == NO_MEMORY else "error"


def _fill(file: BinaryIO, text: str) -> None:
    file.write(text.encode("utf-8", "surrogatepass"))
    file.seek(0)


def _read(file: BinaryIO, most: int) -> bytes:
    file.seek(0)
    return file.read(most)
