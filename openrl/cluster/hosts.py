"""The Ray actors that host workers: each builds one worker in its process, forwards calls, and
gives signs of life: it touches its log file regularly while it runs."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray

from openrl.cluster.fork_server import Early, Preload
from openrl.cluster.group import WorkerContext
from openrl.registry import load_plugins
from openrl.waiting import maybe_await

BEAT_S = 5.0  # seconds between two touches of the log file


class ActorHost:
    """The actor for a worker with plain methods: it runs one call at a time on the main thread."""

    def __init__(self) -> None:
        # The clusters of ``start_cluster`` make their workers, and in turn the workers' children,
        # ignore SIGCHLD, so that every exit code would read 0. We restore it through libc because
        # Python sets signals on the main thread only, and Ray builds async actors on another.
        ctypes.CDLL(None).signal(signal.SIGCHLD, ctypes.c_void_p(signal.SIG_DFL))

    def begin(self, directory: str, log: str, early: Early | None) -> tuple[str, int, int]:
        """Open the log and call ``early``, before ``build`` imports the worker. Returns (address of
        the node, a port that is free there, process id).

        ``directory`` is the driver's working directory. The process changes to it, if the node has
        it, so that relative paths in flags mean the same here."""
        if log:
            begin_log(log)
        if Path(directory).is_dir():
            os.chdir(directory)
        else:
            where = f"{socket.gethostname()} has no {directory}"
            print(f"WARNING: {where}: relative paths begin at {Path.cwd()} here", flush=True)
        if early:
            early()
        gc.disable()  # until ``build``: while modules load it finds nothing and takes a fifth
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1], os.getpid()

    def build(self, worker_class: type, context: WorkerContext, *args: Any) -> None:
        """Build the worker; in the constructor Ray would change the type of its errors."""
        load_plugins(context.plugins)
        self._worker = worker_class(context, *args)
        gc.collect()
        gc.freeze()
        gc.enable()

    def invoke(self, method: str, *args: Any) -> Any:
        return getattr(self._worker, method)(*args)

    def hand_out(self, method: str, *args: Any) -> tuple[bool, Any]:
        """Return whether a plain method has a result, and the result, each as a Ray object of its
        own: the driver reads the first and passes the second on."""
        result = self.invoke(method, *args)
        return result is not None, result


class AsyncActorHost(ActorHost):
    """The actor for a worker with coroutine methods: many calls at a time on one event loop."""

    async def invoke(self, method: str, *args: Any) -> Any:
        return await maybe_await(getattr(self._worker, method)(*args))


@dataclass(frozen=True)
class GroupSettings:
    """How the processes of a group run."""

    timeout: float | None = 3600  # seconds for the answer of all ranks to a call; None: no limit
    ranks_per_shard: int = 1
    plugins: tuple[str, ...] = ()  # modules that every process imports first
    env: Mapping[str, str] = field(default_factory=dict)  # overrides that of all workers
    log_dir: str = ""  # absolute; empty: no logs besides Ray's own
    stall_timeout: float = 0.0  # seconds that a worker may show no sign of life; 0: unlimited
    preload: Preload | None = None  # what the processes do before they import their worker

    def log_path(self, role: str, rank: int) -> str:
        """Return the path of a worker's log; empty if there is none."""
        return str(Path(self.log_dir) / f"{role}-{rank}.log") if self.log_dir else ""


def begin_log(path: str) -> None:
    """Append the output of this process and its children to ``path`` from now on, and touch the
    file every BEAT_S seconds. Do nothing if its directory does not exist on this machine."""
    if not Path(path).parent.is_dir():
        return
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    os.write(file, f"-- {Path(path).stem}, process {os.getpid()}, {started}\n".encode())
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    threading.Thread(target=_beat, args=(Path(path),), daemon=True).start()


def _beat(path: Path) -> None:
    """Touch the log forever, except while a child is stopped (SIGSTOP): its parent waits for it, so
    both count as stalled."""
    own = psutil.Process()
    while True:
        time.sleep(BEAT_S)
        with suppress(OSError, psutil.Error):
            stopped = [c for c in own.children(recursive=True) if c.status() == "stopped"]
            if not stopped:
                os.utime(path)


class Heartbeat:
    """For how long the process that touches a log has given no sign of life. Counted on our own
    clock, from when we first saw the file's latest time: the clocks of two machines differ, and the
    clock of one jumps when it wakes from sleep."""

    def __init__(self, path: str) -> None:
        self._path, self._touched, self._since = Path(path), 0, time.monotonic()

    def silence(self) -> float | None:
        """Return the seconds; None if there is no such file on this machine."""
        with suppress(OSError):
            touched = self._path.stat().st_mtime_ns
            if touched != self._touched:
                self._touched, self._since = touched, time.monotonic()
            return time.monotonic() - self._since
        return None
