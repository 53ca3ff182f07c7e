"""Functions that set signals, as those do that limit their own time with ``signal.alarm``: only the
main thread of a process may. Each call runs in a process of its own."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrl.agents.files.stand_ins import install_stand_ins
from openrl.processes.child import ChildProcess, Limits
from openrl.processes.worker import AskParent, Loaded, load_module
from openrl.vision.parts import Content, shown
from openrl.waiting import in_daemon

MOST = 64  # processes at a time beside one engine
LIMITS = Limits(0.0, 8 * 2**30, "", "for a call of a tool")  # its time is the toolbox's to limit


@dataclass(frozen=True)
class FunctionCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class FunctionFile:
    """A file of functions, for a process."""

    path: Path

    def __str__(self) -> str:
        return f"--tools {self.path}"

    def load(self) -> Loaded:
        install_stand_ins()
        module = load_module(self.path, "tool_file")

        def call(request: FunctionCall, ask: AskParent) -> Content:
            found = getattr(module, request.name)(**request.arguments)
            return shown(asyncio.run(found) if inspect.iscoroutine(found) else found)

        return Loaded(call)


class ToolProcesses:
    """Runs functions of a file in processes."""

    def __init__(self, file: Path) -> None:
        self._target = FunctionFile(file.resolve())
        self._most = asyncio.Semaphore(MOST)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        """Call a function. Cancelling ends its process. Raises CallFailed, and UserError if the
        file does not load."""
        async with self._most:
            process = ChildProcess(self._target, LIMITS, "tool")
            try:
                return await in_daemon(_call_once, process, FunctionCall(name, arguments))
            finally:
                process.interrupt()


def _call_once(process: ChildProcess, request: FunctionCall) -> Content:
    with process:
        return process.call(request)


def names_signals(function: Callable[..., Any]) -> bool:
    """Whether a function's file imports signals; a coroutine, whose file may hold what all calls
    share, must name them itself."""
    signals = {id(signal), id(signal.signal), id(signal.alarm)}
    held = getattr(inspect.unwrap(function), "__globals__", {})
    names = {name for name, value in held.items() if id(value) in signals}
    if inspect.iscoroutinefunction(function):
        names &= {*inspect.unwrap(function).__code__.co_names}
    return bool(names)


def wants_main_thread(error: Exception) -> bool:
    """Whether code failed because it set a signal in a thread."""
    return isinstance(error, ValueError) and "signal only works in main thread" in str(error)
