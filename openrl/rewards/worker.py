"""The process that runs reward code. Standard library only: it starts fast and loads what the code
loads.

``main`` runs with the argument FD and talks over the connection FD. It receives a ``Target`` and
says ``Ready`` or ``Failed`` once, then answers each ``Call`` with ``Values``, one ``RowValues`` or
``Failed``. When the other end goes away it exits, even in the middle of a call."""

from __future__ import annotations

import importlib.util
import inspect
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from openrl.rewards.reward_rows import RewardRows
from openrl.rewards.signatures import Scorer, recognise

DEFAULT_NAMES = ("reward_func", "compute_score")  # of OpenRLHF; of EasyR1 and verl


@dataclass(frozen=True)
class Call:
    """Score ``rows`` by what the target calls ``name``."""

    name: str
    rows: RewardRows


@dataclass(frozen=True)
class Ready:
    """The target is loaded. ``together``: it compares siblings, so they are never scored one by
    one."""

    together: bool = False


@dataclass(frozen=True)
class Values:
    """What the function returned for all rows, in the shape that ``protocol.read_reply`` reads."""

    values: Any


@dataclass(frozen=True)
class Failed:
    """The code failed; ``message`` is for the person who wrote it."""

    message: str


@dataclass(frozen=True)
class RowValues:
    """The reply of what scores one row at a time."""

    rows: list[Values | Failed]


Loaded = Callable[[str, RewardRows], Values | RowValues]


class Target(Protocol):
    """What a process runs. Picklable."""

    def load(self) -> tuple[Ready, Loaded]:
        """Import the code, and check that it can be called. Any error is reported to the other
        end."""


@dataclass(frozen=True)
class FileTarget:
    """A Python file and the function in it; None looks for one of DEFAULT_NAMES."""

    path: Path  # absolute
    function: str | None
    kwargs: Mapping[str, Any]

    def __str__(self) -> str:
        return f"--remote_rm_url: {self.path}" + (f":{self.function}" if self.function else "")

    def load(self) -> tuple[Ready, Loaded]:
        module = load_module(self.path)
        scorer = recognise(
            find_function(module, self.function), self.kwargs, getattr(module, "REWARD_TYPE", None)
        )
        return Ready(scorer.together), lambda name, rows: call(scorer, rows, str(self.path))


@dataclass(frozen=True)
class VerifierTarget:
    """Registered verifiers by name, each with its options as plain values."""

    options: Mapping[str, Mapping[str, Any]]
    plugins: tuple[str, ...]

    def __str__(self) -> str:
        return f"--reward_funcs: {', '.join(self.options)}"

    def load(self) -> tuple[Ready, Loaded]:
        from openrl.extension_points import verifiers
        from openrl.registry import load_plugins
        from openrl.rewards.verifiers.base import read_options

        load_plugins(self.plugins)
        chosen = {
            n: (verifiers[n].component, read_options(n, dict(given)))
            for n, given in self.options.items()
        }
        return Ready(), lambda name, rows: verify(*chosen[name], rows)


def load_module(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent))  # the file may import its neighbours
    spec = importlib.util.spec_from_file_location("reward_file", path)
    assert spec is not None and spec.loader is not None  # as for every path that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def find_function(module: ModuleType, name: str | None) -> Callable[..., Any]:
    """Raises AttributeError listing what there is."""
    for wanted in (name,) if name else DEFAULT_NAMES:
        if callable(function := getattr(module, wanted, None)):
            return function
    there = [
        n
        for n, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__ == module.__name__
    ]
    raise AttributeError(
        f"it defines no function {name or DEFAULT_NAMES[0]!r}, but"
        f" {', '.join(there) or 'none at all'}"
    )


def call(scorer: Scorer, rows: RewardRows, path: str) -> Values | RowValues:
    """What the function returns for the rows; what it raises for one row does not touch the
    others."""
    if not scorer.by_row:
        return Values(scorer(rows))
    return RowValues([_one(scorer, rows.pick([i]), path) for i in range(len(rows))])


def verify(verifier: Callable[..., Any], options: Any, rows: RewardRows) -> RowValues:
    """The verdicts of a verifier, row by row, in the protocol's shape."""
    from openrl.rewards.verifiers.base import Answer

    def one(row: RewardRows) -> dict[str, Any]:
        answer = Answer(
            row.prompts[0],
            row.texts[0],
            row.labels[0],
            row.sources[0],
            row.metas[0],
            row.token_ids[0],
        )
        verdict = verifier(answer, options)
        return {"rewards": verdict.reward, "scores": verdict.passed, "extra_logs": verdict.parts}

    return RowValues([_one(one, rows.pick([i]), "") for i in range(len(rows))])


def _one(score: Callable[[RewardRows], Any], row: RewardRows, path: str) -> Values | Failed:
    try:
        return Values(score(row))
    except Exception as error:
        return Failed(describe(error, path))


def describe(error: BaseException, path: str) -> str:
    """The error with its last place in the user's file: "ValueError: no digits (reward.py, line
    12)"."""
    places = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    where = f" ({Path(path).name}, line {places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {error}{where}"


def _receive(connection: Connection, calls: queue.SimpleQueue[Call]) -> None:
    try:
        while True:
            calls.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)  # nobody waits for an answer; the main thread may hang in the user's code


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    target = connection.recv()
    path = str(getattr(target, "path", ""))
    calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, calls), daemon=True).start()
    try:
        ready, loaded = target.load()
    except Exception as error:
        connection.send(Failed(describe(error, path)))
        return
    connection.send(ready)
    while True:
        asked = calls.get()
        try:
            reply: Values | RowValues | Failed = loaded(asked.name, asked.rows)
        except Exception as error:
            reply = Failed(describe(error, path))
        connection.send(reply)
