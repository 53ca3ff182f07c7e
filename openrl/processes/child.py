"""Child processes for other people's code, which may hang, crash, print or eat memory without
harm to the caller.

Each call blocks a thread, never the event loop. A process that exceeds the time or memory limit of
a call is killed together with everything it started. Memory is watched (resident bytes of the
process and its children) rather than limited by the kernel: a limit on address space breaks
libraries that reserve far more than they use."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import psutil

import openrl
from openrl.errors import UserError
from openrl.processes.worker import Outcome, Question, Target

MARK = "OPENRL_PROCESS"  # environment variable that a process and all its descendants inherit
STALE = 0.2  # seconds for which one scan of all processes is reused
START_TIMEOUT = 120.0  # seconds; the file may import large libraries
WATCH_INTERVAL = 0.2  # seconds between checks of the memory
_MAIN = (  # not -m, because classes that are pickled must not live in __main__
    "from openrl.processes.worker import main; main()"
)

Answers = Callable[[Any], "Future[Any]"]
"""Answers a question that the code asks during a call."""


@dataclass(frozen=True)
class Limits:
    """The time and memory that one call may use, and the flags that set these limits."""

    timeout: float  # seconds, without the time the code waits for our answers; 0: no limit
    memory: int  # bytes, of the process and everything it started
    timeout_flag: str
    memory_flag: str


class CallFailed(Exception):
    """A call returned no value; the message says why, and ``kind`` in a word: error (the code
    raised it), value (a ``WrongValueError``), timeout, memory or crash."""

    def __init__(self, message: str, kind: str = "error") -> None:
        super().__init__(message)
        self.kind = kind


class ChildProcess:
    """A process that starts when first needed, and again after it was killed; it ends with its
    context. Only one thread may call it at a time; any thread may interrupt it."""

    def __init__(self, target: Target, limits: Limits, kind: str) -> None:
        """``kind`` names the process in messages: "reward" gives "the reward process"."""
        self.target, self.limits, self.kind = target, limits, kind
        self.facts: Any = None  # what the target says about itself, known after ``start``
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = ""
        self._starting, self._interrupted = threading.Lock(), False
        self._sending, self._open = threading.Lock(), set[Future[Any]]()
        self._looked = 0.0  # when the memory was last checked

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def interrupted(self) -> bool:
        """Whether ``interrupt`` has ended the process and ``kill`` has not yet cleaned up."""
        return self._interrupted

    def start(self) -> None:
        """Start the process and load the target. Raises UserError if that fails, and CallFailed if
        another thread interrupts it."""
        self._connection, end = Pipe()
        try:
            self._spawn(end.fileno())
            end.close()
            self._connection.send(self.target)
            self.facts = self._receive(START_TIMEOUT, None)
        except (CallFailed, OSError) as failure:
            interrupted = self._interrupted
            self.kill()
            if interrupted:
                raise CallFailed(f"the {self.kind} process was given up") from None
            raise UserError(f"{self.target}: cannot use it: {failure}") from None

    def ready(self) -> None:
        """Start the process unless it is running."""
        if self._process is None:
            self.start()

    def _spawn(self, line: int) -> None:
        root = str(Path(openrl.__path__[0]).parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._mark = uuid4().hex
        with self._starting:
            if self._interrupted:
                raise CallFailed("it was given up")
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(line)],
                pass_fds=[line],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path, MARK: self._mark},
                start_new_session=True,  # so that one signal reaches nearly everything it starts
            )

    def call(self, value: Any, answers: Answers | None = None, timeout: float | None = None) -> Any:
        """Send ``value`` to the target and return its result. ``timeout`` overrides that of the
        limits. Raises CallFailed, and UserError if the target does not load."""
        flag = self.limits.timeout_flag if timeout is None else ""
        timeout = self.limits.timeout if timeout is None else timeout
        self.ready()
        try:
            self._send(value)
            return self._receive(timeout, answers, flag)
        except OSError:
            raise CallFailed(f"the {self.kind} process {self._ending()}", "crash") from None
        except RecursionError:  # of pickle, which has sent nothing yet
            raise CallFailed("what it was to get is nested too deeply to be sent") from None
        finally:
            for future in tuple(self._open):
                future.cancel()

    def interrupt(self) -> None:
        """End the process and everything it started. A call waiting in another thread fails."""
        with self._starting:
            self._interrupted = True
            if (started := self._process) is None:
                return
        kill_family(started.pid, self._mark)

    def kill(self) -> None:
        """End the process and release its resources. The next call starts it again."""
        if self._process is not None:
            self.interrupt()
            self._process.wait()
            with self._sending:  # a send in progress fails, now that nobody reads
                self._connection.close()
            self._process = None
        self._interrupted = False

    def _send(self, message: Any) -> None:
        with self._sending:
            self._connection.send(message)

    def _receive(self, timeout: float, answers: Answers | None, flag: str = "") -> Any:
        """Wait for the result of a call and return it; pass on the questions that come first.
        ``flag`` is what set ``timeout``, for the error message."""
        idle = time.monotonic()  # when the code last waited for an answer of ours
        try:
            while True:
                left = idle + timeout - time.monotonic() if timeout else WATCH_INTERVAL
                if self._connection.poll(max(0.0, min(left, WATCH_INTERVAL))):
                    message = self._connection.recv()
                    if not isinstance(message, Question):
                        break
                    assert answers is not None, "nobody answers this target"
                    self._answer_later(message.id, answers(message.value))
                self._check_memory()
                if self._open:
                    idle = time.monotonic()
                elif left <= 0:
                    self.kill()
                    within = f"{timeout:g} s" + (flag and f" ({flag})")
                    message = f"nothing came back within {within}; the process was killed"
                    raise CallFailed(message, "timeout")
        except (EOFError, OSError):
            raise CallFailed(f"the {self.kind} process {self._ending()}", "crash") from None
        if message.failure is not None:
            raise CallFailed(message.failure, message.kind)
        return message.value

    def _answer_later(self, question: int, future: Future[Any]) -> None:
        def send() -> None:
            self._open.discard(future)
            if future.cancelled():  # the call has ended
                return
            error = future.exception()
            outcome = Outcome(failure=str(error)) if error else Outcome(future.result())
            with contextlib.suppress(OSError):  # the process has ended
                self._send(Question(question, outcome))

        self._open.add(future)
        # in a thread: whoever sets the answer must not wait for a process that does not read
        future.add_done_callback(lambda _: threading.Thread(target=send, daemon=True).start())

    def _check_memory(self) -> None:
        assert self._process is not None
        if (now := time.monotonic()) - self._looked < WATCH_INTERVAL:
            return
        self._looked = now
        if (used := resident_bytes(self._process.pid)) > self.limits.memory:
            self.kill()
            raise CallFailed(
                f"it used {used / 2**30:.1f} GiB of memory, more than the"
                f" {self.limits.memory / 2**30:g} GiB allowed ({self.limits.memory_flag}); the"
                " process was killed",
                "memory",
            )

    def _ending(self) -> str:
        """Clean up after a process that ended by itself, and say how it ended."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        return "closed its connection" if code is None else ending(code)


def ending(code: int) -> str:
    """Describe how a process ended, given its exit code."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with status {code}"


def kill_family(pid: int, mark: str) -> None:
    """Kill a process and everything it started. The process must lead its session and must not
    have been waited for. Descendants that left the session are found by ``mark``, the value of
    their environment variable MARK."""
    family = _family(pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for process in [*family, *_marked(mark)]:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _family(pid: int) -> list[psutil.Process]:
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.Error:
        return []


def _marked(mark: str) -> list[psutil.Process]:
    """Return the processes that carry the mark, including those whose parents have ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process and its descendants; 0 if it has ended."""
    total = 0
    for member in _started.family(pid):
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(member).memory_info().rss
    return total


class _Started:
    """The process tree of the machine. A scan of all processes takes milliseconds, so the dozens
    of processes that are watched share one."""

    def __init__(self) -> None:
        self._lock, self._looked = threading.Lock(), -STALE
        self._children: dict[int, list[int]] = {}

    def family(self, pid: int) -> list[int]:
        with self._lock:
            if time.monotonic() - self._looked >= STALE:
                self._look()
        found = [pid]
        for member in found:
            found += (child for child in self._children.get(member, ()) if child not in found)
        return found

    def _look(self) -> None:
        children: dict[int, list[int]] = defaultdict(list)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                children[process.ppid()].append(process.pid)
        self._children, self._looked = dict(children), time.monotonic()


_started = _Started()
