"""Starts a worker process of a Ray cluster of our own, in its environment.

    python worker_start.py DEFAULT_WORKER.PY OPTIONS --serialized-runtime-env-context=JSON

takes the place of Ray's ``setup_worker.py``, which imports Ray for this, only for the worker to
import it again. It runs before every worker, so it imports the standard library only."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Sequence

FORK_SERVER = "OPENRL_FORK_SERVER"
"""Environment variable of workers that are forked: the socket of their ``ForkServer``."""
LARGEST_REQUEST = 2**17  # bytes of a worker's words and environment
PATIENCE_S = 120.0  # how long to wait until the process that forks has imported everything


def start(words: Sequence[str]) -> None:
    """Become the worker that ``words`` describe, or have it forked."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context", dest="context", default="")
    parser.add_argument("--language")  # Python: runs have no workers in other languages
    options, worker = parser.parse_known_args(words)
    context = json.loads(options.context or "{}")
    for name, value in (context.get("env_vars") or {}).items():
        os.environ[name] = expanded(value)
    # both may be shell code, e.g. "uv run python"
    prefix, python = context.get("command_prefix") or [], context.get("py_executable")
    if not prefix and FORK_SERVER in os.environ:
        try:
            ask_to_fork(worker, os.environ[FORK_SERVER])
            return
        except OSError as error:
            print(f"not forked, so it starts later: {error}", file=sys.stderr)
    command = [*prefix, "exec", python or sys.executable, *map(shlex.quote, worker)]
    os.execvp("bash", ["bash", "-c", " ".join(command)])


def expanded(value: str) -> str:
    """Replace variables as Ray does: ${X} is the value of X, and nothing if there is none."""
    return re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))


def ask_to_fork(worker: Sequence[str], path: str) -> None:
    """Have the worker forked by the process that listens at ``path``. Raises OSError if it was not:
    that process may have failed to import something, which the worker itself shows best."""
    request = json.dumps([worker, dict(os.environ)]).encode()
    if len(request) > LARGEST_REQUEST:
        raise OSError(f"its environment has more than {LARGEST_REQUEST} bytes")
    with open_socket() as asking:
        asking.settimeout(PATIENCE_S)
        asking.connect(path)
        socket.send_fds(asking, [request], [1, 2])
        if not asking.recv(1):
            raise OSError("the process that forks workers could not")


def open_socket() -> socket.socket:
    """Return a socket for requests. They arrive whole, as the files that come with them must."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


if __name__ == "__main__":
    start(sys.argv[1:])
