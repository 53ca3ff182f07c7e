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
import sys
from collections.abc import Sequence


def start(words: Sequence[str]) -> None:
    """Become the worker that ``words`` describe."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context", dest="context", default="")
    parser.add_argument("--language")  # Python: runs have no workers in other languages
    options, worker = parser.parse_known_args(words)
    context = json.loads(options.context or "{}")
    for name, value in (context.get("env_vars") or {}).items():
        # as Ray does it: ${X} is the value of X, and nothing if there is none
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    # both may be shell code, e.g. "uv run python"
    prefix, python = context.get("command_prefix") or [], context.get("py_executable")
    command = [*prefix, "exec", python or sys.executable, *map(shlex.quote, worker)]
    os.execvp("bash", ["bash", "-c", " ".join(command)])


if __name__ == "__main__":
    start(sys.argv[1:])
