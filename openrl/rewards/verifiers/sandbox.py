"""Runs unreviewed code in a separate process. This is containment, not a security boundary.

Each run is a new interpreter in a new session, with a minimal environment and hard resource limits.
On Linux (x86-64, arm64), a filter of system calls denies it child processes, other programs, the
network, signals to others and every change of files. The filter needs no privileges;
``RunResult.contained`` says whether it was in force. Where the kernel has Landlock (5.13), the code
can open only Python's files.

What remains: without Landlock, the code can read whatever the user can read, including the memory
of the user's other processes, though not of the one that judges it. It shares the machine's caches
and clocks."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

from openrl.rewards.verifiers.base import Unavailable
from openrl.rewards.verifiers.sandbox_child import CONTAINED, NO_MEMORY
from openrl.rewards.verifiers.system_calls import filter_program

Outcome = Literal["done", "error", "timeout", "memory", "output"]
CHILD = Path(__file__).with_name("sandbox_child.py")
LONGEST_MESSAGE = 300  # bytes of standard error
MOST_THREADS = 256  # of a process; one of C can start twenty thousand in a second
LOOK = 0.01  # seconds between two counts of threads


@dataclass(frozen=True)
class RunLimits:
    seconds: float  # of wall time, and of processor time
    memory: int  # bytes of address space
    output: int  # bytes of one file, standard output included


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    outcome: Outcome
    stdout: bytes
    result: bytes  # the value of a "call", as JSON; otherwise empty
    message: str  # the end of standard error
    contained: bool


def run(
    task: dict[str, Any], limits: RunLimits, stdin: str = "", module: dict[str, Any] | None = None
) -> RunResult:
    """Run one task of ``sandbox_child`` and, in a second process, the ``module`` that it uses, if
    there is one. Raises Unavailable if no interpreter can be started."""
    hide_memory()
    with contextlib.ExitStack() as stack:
        ends: list[Any] = [None, None]
        running: list[subprocess.Popen[bytes]] = []
        if module is not None:
            ends = [stack.enter_context(end) for end in socket.socketpair()]
            running.append(_start(stack, module, limits, "", ends[1]).process)
        child = _start(stack, task, limits, stdin, ends[0])
        for end in filter(None, ends):
            end.close()  # so that each child sees when the other has ended
        running.append(child.process)
        _wait(running, limits.seconds)
        timed_out = child.process.poll() is None
        _end(child.process)
        result = _read(child.out, limits.output)
        full = os.fstat(child.stdout.fileno()).st_size >= limits.output
        return RunResult(
            outcome=_outcome(child.process.returncode, timed_out, full),
            stdout=_read(child.stdout, limits.output),
            result=result[1:],
            message=_read(child.stderr, LONGEST_MESSAGE).decode(errors="replace"),
            contained=result[:1] == CONTAINED,
        )


@cache
def hide_memory() -> None:
    """Hide the memory and environment of this process, which hold the expected values, from the
    user's other processes, for good."""
    if sys.platform == "linux":
        set_dumpable = 4
        ctypes.CDLL(None).prctl(set_dumpable, 0, 0, 0, 0)


@dataclass(frozen=True)
class Child:
    process: subprocess.Popen[bytes]
    stdout: BinaryIO
    stderr: BinaryIO
    out: BinaryIO


def _start(
    stack: contextlib.ExitStack,
    task: dict[str, Any],
    limits: RunLimits,
    stdin: str,
    link: socket.socket | None,
) -> Child:
    """Start a process that is killed when the stack closes."""
    resources = {
        "RLIMIT_CPU": math.ceil(limits.seconds),
        "RLIMIT_AS": limits.memory,
        "RLIMIT_FSIZE": limits.output,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }
    # -S skips site, which would take longer than all else, so its directories are passed on
    packages = [path for path in sys.path if Path(path).name == "site-packages"]
    source, given, stdout, stderr, out = (
        stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        for _ in range(5)
    )
    whole = task | {
        "limits": resources,
        "parent": os.getpid(),
        "path": packages,
        "filter": filter_program().hex(),
    }
    _fill(source, json.dumps(whole))
    _fill(given, stdin)
    fds = [source.fileno(), out.fileno(), -1 if link is None else link.fileno()]
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(CHILD), *map(str, fds)],
            stdin=given,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[fd for fd in fds if fd >= 0],
            cwd="/",  # needs no cleaning up, because nothing can be written
            env={"PATH": os.defpath, "HOME": "/", "LC_ALL": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
    except OSError as error:
        message = f"cannot start an interpreter for the response's code: {error}"
        raise Unavailable(message) from None
    stack.callback(_end, process)
    return Child(process, stdout, stderr, out)


def _wait(running: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait for the last process to end, and kill it if one of them has too many threads: the
    kernel's limits count those of a user, and none of root's."""
    last = time.monotonic() + seconds
    while (left := last - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[-1].wait(min(left, LOOK))
            return
        if max(_threads(process.pid) for process in running) > MOST_THREADS:
            _end(running[-1])


def _threads(pid: int) -> int:
    with contextlib.suppress(OSError):
        if found := re.search(r"^Threads:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M):
            return int(found[1])
    return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and whatever is left of its session."""
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
