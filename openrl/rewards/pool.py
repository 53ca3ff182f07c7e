"""Processes that run reward code: it may hang, crash or print, and the engine beside it goes on.

Calls block a thread each, never the event loop. A call that outlives its time is killed with everything it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import openrl
from openrl.errors import UserError
from openrl.rewards.worker import Failed, Ready, Rows, Values

START_TIMEOUT = 120.0  # seconds; the file may import large libraries
_MAIN = "from openrl.rewards.worker import main; main()"  # not -m: what is pickled must not live in __main__


@dataclass(frozen=True)
class RewardFile:
    """A Python file and the function in it."""

    path: Path  # absolute
    function: str = "reward_func"

    def __str__(self) -> str:
        return f"{self.path}:{self.function}"


class RewardFailure(Exception):
    """A call gave no values; the message says why. ``row`` is the one at fault, None where it is not known."""

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


class RewardProcess:
    """One worker process, started when first needed and again after it was killed. Not for several threads at a time."""

    def __init__(self, file: RewardFile, timeout: float) -> None:
        self.file, self.timeout = file, timeout
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and import the file. Raises UserError if the file does not import or lacks the function."""
        self._connection, theirs = Pipe()
        root = str(Path(openrl.__path__[0]).parent)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(theirs.fileno()), str(self.file.path), self.file.function],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
            start_new_session=True,  # so that one signal reaches all that it starts
        )
        theirs.close()
        try:
            reply = self._receive(START_TIMEOUT)
        except RewardFailure as failure:
            raise UserError(f"--remote_rm_url: while importing {self.file.path}, {failure}") from None
        if isinstance(reply, Failed):
            self.kill()
            raise UserError(f"--remote_rm_url: cannot use {self.file.path}: {reply.message}")

    def call(self, rows: Rows) -> Any:
        """The function's values for the rows. Raises RewardFailure."""
        if self._process is None:
            self.start()
        try:
            self._connection.send(rows)
        except OSError:
            raise RewardFailure(f"the reward process {self._ending()}") from None
        reply = self._receive(self.timeout)
        if isinstance(reply, Failed):
            raise RewardFailure(reply.message, reply.row)
        assert isinstance(reply, Values)
        return reply.values

    def interrupt(self) -> None:
        """End the process and all that it started; a call that waits in another thread fails."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """``interrupt``, and free what it held; the next call starts it again."""
        self.interrupt()
        if self._process is not None:
            self._process.wait()
            self._connection.close()
            self._process = None

    def _receive(self, timeout: float) -> Ready | Values | Failed:
        try:
            if self._connection.poll(timeout):
                return self._connection.recv()
        except (EOFError, OSError):
            raise RewardFailure(f"the reward process {self._ending()}") from None
        self.kill()
        raise RewardFailure(f"nothing came back within {timeout:g} s (--reward_timeout); the process was killed")

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
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


class RewardPool:
    """Up to ``size`` worker processes behind one coroutine, started as calls overlap.

    Calls beyond ``size`` wait without using up their time.
    """

    def __init__(self, file: RewardFile, size: int, timeout: float) -> None:
        self._processes = [RewardProcess(file, timeout) for _ in range(size)]
        self._idle: queue.LifoQueue[RewardProcess] = queue.LifoQueue()
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="reward")

    async def call(self, rows: Rows) -> Any:
        """The function's values for the rows. Raises RewardFailure, UserError if the file does not import."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, rows)

    def _call(self, rows: Rows) -> Any:
        process = self._idle.get()
        try:
            return process.call(rows)
        finally:
            self._idle.put(process)

    async def close(self) -> None:
        for process in self._processes:
            process.interrupt()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        for process in self._processes:
            process.kill()
