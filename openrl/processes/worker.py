"""The inside of a process that runs code of others. Standard library only: it starts fast and loads
what the code loads.

``main`` runs with the argument FD and talks over the connection FD. It receives a ``Target`` and
says ``Reply`` or ``Failed`` once, then answers each call with one of them. In the middle of a call
the code may ask the other end ``Question``s. When the other end goes away it ends with all that it
has started, even in the middle of a call."""

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
    """What a call returned; at the start ``Loaded.facts``."""

    value: Any


@dataclass(frozen=True)
class Failed:
    """The code failed; ``message`` is for the person who wrote it."""

    message: str


@dataclass(frozen=True)
class Question:
    """What the code wants to know in the middle of a call."""

    id: int
    value: Any


@dataclass(frozen=True)
class Answer:
    """To the question of that id."""

    id: int
    reply: Reply | Failed


class QuestionFailed(Exception):
    """The other end has no answer; the message says why."""


Ask = Callable[[Any], "Future[Any]"]
"""Puts a question to the other end, from any thread; several may be open at a time."""


@dataclass(frozen=True)
class Loaded:
    """A target that takes calls."""

    call: Callable[[Any, Ask], Any]  # the value of a call, and the means to ask back
    facts: Any = None  # what the other end is to know of it


class Target(Protocol):
    """What a process runs. Picklable; its text names it in messages."""

    def load(self) -> Loaded:
        """Import the code, and check that it can be called. Any error is reported to the other
        end."""


def load_module(path: Path, name: str) -> ModuleType:
    """Run a file as the module ``name``; it may import its neighbours."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # as for every path that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class NotUsable(Exception):
    """What the code brings cannot be used; the message says all that there is to know."""


def describe(error: BaseException, path: str) -> str:
    """The error with its last place in the user's file: "ValueError: no digits (reward.py, line
    12)"."""
    if isinstance(error, NotUsable):
        return str(error)
    places = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    where = f" ({Path(path).name}, line {places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {error}{where}"


class _Line:
    """This end of the connection."""

    def __init__(self, connection: Connection) -> None:
        self.calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._connection, self._sending = connection, threading.Lock()
        self._open: dict[int, Future[Any]] = {}
        self._ids = itertools.count()

    def send(self, message: Reply | Failed | Question) -> None:
        with self._sending:
            self._connection.send(message)

    def ask(self, value: Any) -> Future[Any]:
        question, future = Question(next(self._ids), value), Future[Any]()
        self._open[question.id] = future
        self.send(question)
        return future

    def listen(self) -> None:
        """Sort what arrives, until the other end goes away."""
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, Answer):
                    self._resolve(message)
                else:
                    self.calls.put(message)
        except (EOFError, OSError):
            # nobody waits for an answer, and the main thread may hang in the user's code
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
        # also of a value that cannot be pickled, of which nothing is sent
        except Exception as error:
            line.send(Failed(describe(error, path)))
