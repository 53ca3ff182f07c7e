"""The code inside a child process. It imports only the standard library, so it starts fast and
loads nothing that the user's code does not load.

``main`` takes a file descriptor as its argument and talks over that connection. It receives a
``Target``, sends an ``Outcome`` once it has loaded, and then one for each call. During a call, the
code may ask the other end ``Question``s. When the other end goes away, the process kills its
process group, even in the middle of a call."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import itertools
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol


@dataclass(frozen=True)
class Outcome:
    """What a call or a question returned, or why it failed. The first one is that of loading, with
    ``Loaded.facts`` as its value."""

    value: Any = None
    failure: str | None = None  # written for the author of the code
    kind: str = "error"  # of a failure: error, or value if the code gave a ``WrongValueError``


@dataclass(frozen=True)
class Question:
    """What the code asks during a call. It comes back with its ``Outcome`` as the value."""

    id: int
    value: Any


AskParent = Callable[[Any], "Future[Any]"]
"""Asks the other end a question, from any thread; several may be open at a time. The future raises
RuntimeError if the other end has no answer."""


@dataclass(frozen=True)
class Loaded:
    """A loaded target, ready for calls."""

    call: Callable[[Any, AskParent], Any]  # takes the value of a call, and a function to ask back
    facts: Any = None  # what the target tells the other end about itself


class Target(Protocol):
    """What a process runs. A target can be pickled; ``str`` of it names it in messages."""

    def load(self) -> Loaded:
        """Import the code and check that it can be called. Any error is sent to the other end."""


def load_module(path: Path, name: str) -> ModuleType:
    """Run a file, which may import its neighbours, as the module ``name``; return the module. With
    relative imports, it runs as a module of the package that its directory is or stands for."""
    sys.path.insert(0, str(path.parent))
    if dots := _most_dots(path):
        name = f"{_package(path.parent, dots, name)}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # true of every path that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _most_dots(path: Path) -> int:
    """Return the most dots before a module that the file imports from; 0 without any."""
    try:
        nodes = ast.walk(ast.parse(path.read_bytes()))
    except (OSError, SyntaxError, ValueError):  # running the file says what is wrong
        return 0
    return max((node.level for node in nodes if isinstance(node, ast.ImportFrom)), default=0)


def _package(directory: Path, dots: int, name: str) -> str:
    """Return the name of a directory as a package: its own, if it has an ``__init__.py``; otherwise
    one is made of it, and of those above it that ``dots`` reach, whose names begin with ``name``.
    """
    if (directory / "__init__.py").is_file():
        top = next(d for d in directory.parents if not (d / "__init__.py").is_file())
        sys.path.insert(0, str(top))
        package = ".".join(directory.relative_to(top).parts)
        importlib.import_module(package)
        return package
    above = _package(directory.parent, dots - 1, name) if dots > 1 else name
    package = f"{above}.{directory.name.replace('.', '_')}" if dots > 1 else f"{name}_directory"
    made = sys.modules[package] = ModuleType(package)
    made.__path__ = [str(directory)]
    return package


class WrongValueError(ValueError):
    """The code gave a number that nobody can use."""


class NotUsable(ValueError):
    """The user's code cannot be used, or what it returned. The message is complete without the
    line of the error."""


def describe(error: BaseException, path: str) -> str:
    """Return the error with its last line in the user's file: "ValueError: no digits (reward.py,
    line 12)"."""
    if isinstance(error, NotUsable):
        return str(error)
    places = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    where = f" ({Path(path).name}, line {places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {error}{where}"


class _Pickler(ForkingPickler):
    """Writes texts of other people's classes, which the other end cannot import, as plain texts."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, str) and not type(value).__module__.startswith("openrl."):
            return str, (str.__str__(value),)
        return NotImplemented


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Line:
    """The child's end of the connection."""

    def __init__(self, connection: Connection) -> None:
        self.calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._connection, self._sending = connection, threading.Lock()
        self._open: dict[int, Future[Any]] = {}
        self._ids = itertools.count()

    def send(self, message: Outcome | Question) -> None:
        with self._sending:
            try:
                self._connection.send_bytes(pickled(message))
            except (BrokenPipeError, ConnectionResetError):
                os.killpg(0, signal.SIGKILL)  # the other end has gone

    def ask(self, value: Any) -> Future[Any]:
        question, future = Question(next(self._ids), value), Future[Any]()
        self._open[question.id] = future
        self.send(question)
        return future

    def listen(self) -> None:
        """Queue the calls and resolve the answers that arrive, until the other end goes away."""
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, Question):
                    self._resolve(message)
                else:
                    self.calls.put(message)
        except (EOFError, OSError):
            # nobody waits for a result now, and the main thread may hang in the user's code
            os.killpg(0, signal.SIGKILL)

    def _resolve(self, answered: Question) -> None:
        future, outcome = self._open.pop(answered.id), answered.value
        if future.set_running_or_notify_cancel():
            if outcome.failure is not None:
                future.set_exception(RuntimeError(outcome.failure))
            else:
                future.set_result(outcome.value)


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    target = connection.recv()
    path = str(getattr(target, "path", ""))
    line = _Line(connection)
    threading.Thread(target=line.listen, daemon=True).start()
    try:
        loaded = target.load()
        line.send(Outcome(loaded.facts))
    except Exception as error:
        line.send(Outcome(failure=describe(error, path)))
        return
    while True:
        request = line.calls.get()
        try:
            line.send(Outcome(loaded.call(request, line.ask)))
        # also when the value cannot be pickled: that fails before anything is sent
        except Exception as error:
            kind = "value" if isinstance(error, WrongValueError) else "error"
            line.send(Outcome(failure=describe(error, path), kind=kind))
