"""The process that runs a reward file. Standard library only: it starts fast and loads what the file loads.

``main`` runs with the arguments FD PATH FUNCTION and talks over the connection FD. It says ``Ready`` or ``Failed`` once,
then answers each ``Rows`` with ``Values`` or ``Failed``. When the other end goes away it exits, even in the middle of
a call.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Rows:
    """The arguments of a reward function; the lists are equally long."""

    queries: list[str]  # prompt and response
    prompts: list[str]
    labels: list[Any]
    responses: list[str]  # only for functions that take it

    def __len__(self) -> int:
        return len(self.queries)

    def row(self, i: int) -> Rows:
        return Rows(**{name: [values[i]] for name, values in asdict(self).items()})


@dataclass(frozen=True)
class Ready:
    """The file is imported and the function found."""


@dataclass(frozen=True)
class Values:
    """What the function returned, in plain numbers, lists and dicts."""

    values: Any


@dataclass(frozen=True)
class Failed:
    """The file or the function failed; ``message`` is for the person who wrote it, ``row`` the one it failed on."""

    message: str
    row: int | None = None


def load_function(path: str, name: str) -> Callable[..., Any]:
    """The function ``name`` of the Python file ``path``. Raises AttributeError listing what there is, or any error of
    the file itself."""
    sys.path.insert(0, str(Path(path).parent))  # the file may import its neighbours
    spec = importlib.util.spec_from_file_location("reward_file", path)
    assert spec is not None and spec.loader is not None  # as for every path that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise AttributeError(f"it defines no function {name!r}, but {', '.join(_functions(module)) or 'none at all'}")
    return function


def _functions(module: ModuleType) -> list[str]:
    return [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]


def call(function: Callable[..., Any], rows: Rows) -> Any:
    """What the function returns for the rows, as plain values."""
    arguments = {"queries": rows.queries, "prompts": rows.prompts, "labels": rows.labels}
    if "responses" in inspect.signature(function).parameters:
        arguments["responses"] = rows.responses
    return plain(function(**arguments))


def failure(function: Callable[..., Any], rows: Rows, error: Exception, path: str) -> Failed:
    """The report of a call that raised; the first row that raises alone is the one to show."""
    for i in range(len(rows)):
        try:
            call(function, rows.row(i))
        except Exception as alone:
            return Failed(describe(alone, path), i)
    return Failed(describe(error, path))


def plain(value: Any) -> Any:
    """Tensors and arrays become lists or numbers, so that the other side needs none of their libraries.

    Raises TypeError for what is no number, text, list or dict.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    raise TypeError(f"it returned a {type(value).__name__}; numbers, lists, tensors and dicts are understood")


def describe(error: BaseException, path: str) -> str:
    """The error with its last place in the user's file: "ValueError: no digits (reward.py, line 12)"."""
    places = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    where = f" ({Path(path).name}, line {places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {error}{where}"


def _receive(connection: Connection, requests: queue.SimpleQueue[Rows]) -> None:
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)  # nobody waits for an answer; the main thread may hang in the user's code


def main() -> None:
    fd, path, name = sys.argv[1:]
    connection = Connection(int(fd))
    requests: queue.SimpleQueue[Rows] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    try:
        function = load_function(path, name)
    except Exception as error:
        connection.send(Failed(describe(error, path)))
        return
    connection.send(Ready())
    while True:
        rows = requests.get()
        try:
            reply: Values | Failed = Values(call(function, rows))
        except Exception as error:
            reply = failure(function, rows, error, path)
        connection.send(reply)
