"""The code inside a child process. It imports only the standard library, so it starts fast and
loads nothing that the user's code does not load.

``main`` takes a file descriptor as its argument and talks over that connection. It receives a
``Target``, replies with ``Reply`` or ``Failed`` once it has loaded, and then answers each call with
one of these two. During a call, the code may ask the other end ``Question``s. When the other end
goes away, the process kills its process group, even in the middle of a call."""

from __future__ import annotations

import importlib.util
import itertools
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol


@dataclass(frozen=True)
class Reply:
    """The value that a call returned; the first one is ``Loaded.facts``."""

    value: Any


@dataclass(frozen=True)
class Failed:
    """The code failed; ``message`` is written for the author of the code. ``kind`` is error, or
    value if it gave a ``WrongValueError``."""

    message: str
    kind: str = "error"


@dataclass(frozen=True)
class Question:
    """What the code asks during a call."""

    id: int
    value: Any


@dataclass(frozen=True)
class Answer:
    """The answer to the question with this id."""

    id: int
    reply: Reply | Failed


class QuestionFailed(Exception):
    """The other end has no answer; the message says why."""


AskParent = Callable[[Any], "Future[Any]"]
"""Asks the other end a question, from any thread; several may be open at a time."""


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
    """Run a file, which may import its neighbours, as the module ``name``; return the module."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # true of every path that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class WrongValueError(ValueError):
    """The code gave a number that nobody can use."""


class NotUsable(ValueError):
    """The user's code, or what it returned, cannot be used; the message is complete without the line
    of the error."""


def describe(error: BaseException, path: str) -> str:
    """Return the error with its last line in the user's file: "ValueError: no digits (reward.py,
    line 12)"."""
    if isinstance(error, NotUsable):
        return str(error)
    places = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    where = f" ({Path(path).name}, line {places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {error}{where}"


class _Line:
    """The child's end of the connection."""

    def __init__(self, connection: Connection) -> None:
        self.calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._connection, self._sending = connection, threading.Lock()
        self._open: dict[int, Future[Any]] = {}
        self._ids = itertools.count()

    def send(self, message: Reply | Failed | Question) -> None:
        with self._sending:
            try:
                self._connection.send(message)
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
                if isinstance(message, Answer):
                    self._resolve(message)
                else:
                    self.calls.put(message)
        except (EOFError, OSError):
            # nobody waits for a result now, and the main thread may hang in the user's code
            os.killpg(0, signal.SIGKILL)

    def _resolve(self, answer: Answer) -> None:
        future = self._open.pop(answer.id)
        if future.set_running_or_notify_cancel():
            if isinstance(answer.reply, Failed):
                future.set_exception(QuestionFailed(answer.reply.message))
            else:
                future.set_result(answer.reply.value)


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    target = connection.recv()
    path = str(getattr(target, "path", ""))
    line = _Line(connection)
    threading.Thread(target=line.listen, daemon=True).start()
    try:
        loaded = target.load()
        line.send(Reply(loaded.facts))
    except Exception as error:
        line.send(Failed(describe(error, path)))
        return
    while True:
        asked = line.calls.get()
        try:
            line.send(Reply(loaded.call(asked, line.ask)))
        # also when the value cannot be pickled: that fails before anything is sent
        except Exception as error:
            kind = "value" if isinstance(error, WrongValueError) else "error"
            line.send(Failed(describe(error, path), kind))
