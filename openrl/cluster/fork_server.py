"""The process that workers are forked from, on a cluster of our own without GPUs.

Ray starts each worker as a new Python process, which would then import torch, transformers and
DeepSpeed or vLLM for seconds. Instead, one process per kind of worker imports them once. When Ray
starts a worker, ``worker_start`` asks this process to fork it. It starts no threads (numpy's stop
at a fork) and does not import Ray, whose settings are read at import, from the environment of
the worker."""

from __future__ import annotations

import json
import logging
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from openrl.cluster.worker_start import LARGEST_REQUEST, open_socket
from openrl.lazy import loading
from openrl.processes.leave import leave

log = logging.getLogger(__name__)

CLOSE_S = 2.0  # how long to wait for the process to end by itself
REQUEST_S = 10.0  # how long to wait for a request, once somebody has connected
Early = Callable[[], Any]
"""What a worker does before it imports its class."""


@dataclass(frozen=True)
class Preload:
    """What comes before a group's workers are imported."""

    imports: Callable[[], Any]  # called once, in the process that they are forked from
    early: Early | None = None  # called in every one; if forked, also while it has no threads yet


class ForkServer:
    """The driver's side: the process, and the socket where it can be asked to fork a worker."""

    def __init__(
        self, path: str, preload: Preload, environ: Mapping[str, str], log_path: Path
    ) -> None:
        """Start the process in this environment, with its output in ``log_path``. It listens at
        ``path``, a Unix socket; raises OSError if that is too long."""
        self._log = log_path
        with open_socket() as listening, log_path.open("ab") as output:
            listening.bind(path)
            listening.listen()
            number = listening.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main({number})"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[number],
                env={**os.environ, **environ},
                start_new_session=True,  # Ctrl-C is for the driver
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died: workers start without it
            pickle.dump(preload, self._process.stdin)
            self._process.stdin.flush()

    def close(self) -> None:
        """End the process with everything that it forked, and warn if it had ended before."""
        if (code := self._process.poll()) is not None:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            last = f": {lines[-1]}" if lines else ""
            log.warning("the process that forks workers had ended, exit code %d%s", code, last)
        try:
            self._process.communicate(timeout=CLOSE_S)  # closes its stdin
        except subprocess.TimeoutExpired:  # it still imports, or was stopped
            self._process.kill()
            self._process.wait()


def main(number: int) -> NoReturn:
    """Import what the workers need, then fork one for each request at the socket with this number,
    until stdin closes because the driver ends."""
    listening = socket.socket(fileno=number)
    with suppress(OSError):  # as Ray does for the workers that it starts
        Path("/proc/self/oom_score_adj").write_text("1000")
    sys.modules["ray"] = None  # type: ignore[assignment]  # vLLM takes it as not installed
    with loading():
        preload: Preload = pickle.load(sys.stdin.buffer)
        preload.imports()
    del sys.modules["ray"]
    sys.stdout.flush()  # or every fork would print it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    while True:
        ready, _, _ = select.select([sys.stdin, listening], [], [])
        if sys.stdin in ready:
            end_children()
            leave(0)
        asking, _ = listening.accept()
        with asking:
            answer(asking, listening, preload.early)


def answer(asking: socket.socket, listening: socket.socket, early: Early | None) -> None:
    """Fork the worker that is asked for: its command line, its environment, its stdout and stderr.
    If that fails nobody is answered, and the worker starts anew."""
    asking.settimeout(REQUEST_S)
    outputs: list[int] = []
    try:
        request, outputs, _, _ = socket.recv_fds(asking, LARGEST_REQUEST, 2)
        forked = os.fork()
    except OSError:
        traceback.print_exc()
        forked = -1
    if forked == 0:
        code = 1
        try:
            asking.send(b"forked")
            for inherited in (asking, listening):
                inherited.close()
            words, environ = json.loads(request)
            become_worker(words, environ, outputs, early)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            leave(code)  # never on to what the other process does
    for output in outputs:
        os.close(output)


def end_children() -> None:
    """Kill the workers and what they started, except for Python's own cleaners, which first remove
    shared memory of the others."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "resource_tracker" not in str(process.cmdline()):
                process.kill()


def become_worker(
    words: list[str], environ: dict[str, str], outputs: list[int], early: Early | None
) -> None:
    """Run the script ``words[0]`` as a process does that starts with these words, environment,
    stdout and stderr; ``early`` is called first."""
    os.setpgid(0, 0)  # Ray ends the process group of a worker that has died
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate([nothing, *outputs]):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # it depends on the environment
    if "numpy" in sys.modules:  # unlike Python's, its random numbers are the same in all forks
        sys.modules["numpy"].random.seed()
    if early:
        with suppress(Exception):  # the worker calls it once more, and is heard when it fails
            early()
    added = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = dict.fromkeys([str(Path(words[0]).parent), *added, *sys.path[1:]])
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
