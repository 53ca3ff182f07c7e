"""Processes that run reward code: it may hang, crash, print or eat memory, and the engine beside it
goes on.

Calls block a thread each, never the event loop. A call that outlives its time or outgrows its
memory is killed with everything it started. Memory is watched (resident bytes of the process and
its children) rather than limited by the kernel: a limit on addresses breaks libraries that reserve
far more than they use."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil

import openrl
from openrl.errors import UserError
from openrl.rewards.worker import Call, Failed, Ready, RowValues, Target, Values

START_TIMEOUT = 120.0  # seconds; the file may import large libraries
WATCH_INTERVAL = 0.2  # seconds between looks at the memory
_MAIN = (  # not -m: what is pickled must not live in __main__
    "from openrl.rewards.worker import main; main()"
)


@dataclass(frozen=True)
class Limits:
    """What one call may take."""

    timeout: float  # seconds
    memory: int  # bytes, of the process and what it started


class CallFailed(Exception):
    """A call gave no values; the message says why."""


class RewardProcess:
    """One worker process, started when first needed and again after it was killed. Not for several
    threads at a time."""

    def __init__(self, target: Target, limits: Limits) -> None:
        self.target, self.limits = target, limits
        self.together = False  # known once it has started
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and load the target. Raises UserError if that fails."""
        self._connection, theirs = Pipe()
        root = str(Path(openrl.__path__[0]).parent)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
            start_new_session=True,  # so that one signal reaches all that it starts
        )
        theirs.close()
        try:
            self._connection.send(self.target)
            reply = self._receive(START_TIMEOUT)
        except (CallFailed, OSError) as failure:
            self.kill()
            raise UserError(f"{self.target}: while it was loaded, {failure}") from None
        if isinstance(reply, Failed):
            self.kill()
            raise UserError(f"{self.target}: cannot use it: {reply.message}")
        assert isinstance(reply, Ready)
        self.together = reply.together

    def call(self, call: Call) -> Values | RowValues:
        """The values of the rows. Raises CallFailed."""
        if self._process is None:
            self.start()
        try:
            self._connection.send(call)
        except OSError:
            raise CallFailed(f"the reward process {self._ending()}") from None
        reply = self._receive(self.limits.timeout)
        if isinstance(reply, Failed):
            raise CallFailed(reply.message)
        assert isinstance(reply, (Values, RowValues))
        return reply

    def interrupt(self) -> None:
        """End the process and all that it started; a call that waits in another thread fails."""
        if (started := self._process) is None:  # which another thread may set
            return
        family = _family(started.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        for process in family:  # those that left its session
            with contextlib.suppress(psutil.Error):
                process.kill()

    def kill(self) -> None:
        """``interrupt``, and free what it held; the next call starts it again."""
        self.interrupt()
        if self._process is not None:
            self._process.wait()
            self._connection.close()
            self._process = None

    def _receive(self, timeout: float) -> Ready | Values | RowValues | Failed:
        assert self._process is not None
        deadline = time.monotonic() + timeout
        try:
            while (left := deadline - time.monotonic()) > 0:
                if self._connection.poll(min(left, WATCH_INTERVAL)):
                    return self._connection.recv()
                if (used := resident_bytes(self._process.pid)) > self.limits.memory:
                    self.kill()
                    raise CallFailed(
                        f"it took {used / 2**30:.1f} GiB of memory, {self.limits.memory / 2**30:g}"
                        " are allowed (--reward_memory_gb); the process was killed"
                    )
        except (EOFError, OSError):
            raise CallFailed(f"the reward process {self._ending()}") from None
        self.kill()
        raise CallFailed(
            f"nothing came back within {timeout:g} s (--reward_timeout); the process was killed"
        )

    def _ending(self) -> str:
        """How it ended by itself."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        if code is None:
            return "closed its connection"
        return (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"exited with status {code}"
        )


def _family(pid: int) -> list[psutil.Process]:
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.Error:
        return []


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants; 0 if it has ended."""
    total = 0
    for process in _family(pid):
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


class RewardPool:
    """Up to ``size`` processes of one target behind one coroutine, started as calls overlap.

    The threads of ``executor`` bound the calls that run at a time; those beyond wait without using
    up their time."""

    def __init__(self, target: Target, size: int, limits: Limits, executor: Executor) -> None:
        self.target, self._executor = target, executor
        self._processes = [RewardProcess(target, limits) for _ in range(size)]
        self._idle: queue.LifoQueue[RewardProcess] = queue.LifoQueue()
        self._closed = False
        for process in self._processes:
            self._idle.put(process)

    @property
    def together(self) -> bool:
        """Whether the target compares siblings; known after the first call."""
        return any(process.together for process in self._processes)

    async def call(self, call: Call) -> Values | RowValues:
        """The values of the rows. Raises CallFailed, and UserError if the target does not load."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._call, call)

    def _call(self, call: Call) -> Any:
        process = self._idle.get()
        try:
            if self._closed:
                raise CallFailed("rewards are closed")
            return process.call(call)
        finally:
            self._idle.put(process)

    async def close(self) -> None:
        """Calls that still run fail."""
        if self._closed:  # by another source of the same pool
            return
        self._closed = True
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        ended: list[RewardProcess] = []
        while len(ended) < len(self._processes):
            for process in self._processes:
                process.interrupt()  # again: a call may have been about to start its process
            with contextlib.suppress(queue.Empty):
                ended.append(self._idle.get(timeout=0.5))
                ended[-1].kill()
        for process in ended:  # a call that waits for one finds that all is closed
            self._idle.put(process)
