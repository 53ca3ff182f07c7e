"""Typed, documented Python functions as tools."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

from transformers.utils import get_json_schema

from openrl.agents.base import ToolError, Toolset
from openrl.agents.tools.processes import ToolProcesses, names_signals, wants_main_thread
from openrl.errors import UserError
from openrl.processes.worker import load_module
from openrl.vision.parts import Content, shown
from openrl.waiting import in_daemon

Function = Callable[..., Any]
_PLAIN = (int, float, str, bool, type(None), list, tuple, dict, Any)
SHAPE = 'def f(text: str) -> str with """What it does.  Args:  text: What it is.""" in it'


@dataclass(frozen=True)
class ToolMark:
    """What a function marked as a tool says about itself, in its attribute ``tool_mark``."""

    name: str | None = None
    description: str | None = None
    schema: Mapping[str, Any] | None = None


class FunctionTools(Toolset):
    """Functions as tools. Coroutines are awaited; other functions run in a thread, or, if they set
    signals, which no thread may, in a process."""

    def __init__(self, functions: Sequence[Function], file: Path | None = None) -> None:
        """``file`` has the functions. Raises UserError for a function whose signature and docstring
        make no schema."""
        self.schemas = [schema_of(function) for function in functions]
        names = [schema["function"]["name"] for schema in self.schemas]
        self._functions = dict(zip(names, functions, strict=True))
        self._processes = ToolProcesses(file) if file else None
        self._of_processes = {name for name, f in self._functions.items() if names_signals(f)}

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        function = self._functions[name]
        try:
            if name in self._of_processes and self._processes:
                return await self._processes.call(function.__name__, arguments)
            return shown(await call(function, **arguments))
        except ToolError:
            raise
        except Exception as error:
            if self._processes and name not in self._of_processes and wants_main_thread(error):
                self._of_processes.add(name)
                return await self.call(name, arguments)
            raise ToolError(f"{type(error).__name__}: {error}") from error


def load_file(path: Path) -> ModuleType:
    """Load a file of tools. Raises UserError if it fails."""
    try:
        return load_module(path.resolve(), f"openrl_tools_{path.stem}")
    except (Exception, SystemExit) as error:  # the user's code
        raise UserError(f"--tools: {path} fails: {type(error).__name__}: {error}") from error


def functions_of(module: ModuleType, name: str | None = None) -> list[Function]:
    """Return the function of that name or, without a name, the functions that a module marks as
    tools, else the public ones that it defines."""
    if name is not None:
        named = getattr(module, name, None)
        return [named] if inspect.isfunction(named) else []
    defined: list[Function] = [
        value
        for value in vars(module).values()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    marked = [function for function in defined if hasattr(function, "tool_mark")]
    return marked or [function for function in defined if not function.__name__.startswith("_")]


def schema_of(function: Function) -> dict[str, Any]:
    """Return a function's schema as chat templates take it. Raises UserError that names what is
    missing."""
    mark: ToolMark = getattr(function, "tool_mark", ToolMark())
    if mark.schema is not None:
        return dict(mark.schema)
    schema = _schema_from_types(function)
    schema["function"]["name"] = mark.name or schema["function"]["name"]
    schema["function"]["description"] = mark.description or schema["function"]["description"]
    return schema


def _schema_from_types(function: Function) -> dict[str, Any]:
    name = function.__name__
    try:
        reason = _misfit(function)
        schema: dict[str, Any] = {} if reason else get_json_schema(function)
    except Exception as error:  # from transformers, or from annotations that do not resolve
        reason = str(error.args[0]) if error.args else type(error).__name__
    if reason:
        raise UserError(
            f"{name} cannot be a tool: {reason}",
            f"{SHAPE}; or rename it to _{name} if it is not a tool",
        )
    return schema


def _misfit(function: Function) -> str | None:
    """Say why nobody could call a function as a tool; None if one can."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return "it yields values, but a tool returns one"
    hints = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return f"{parameter} stands for any number of arguments"
        if parameter.kind is parameter.POSITIONAL_ONLY:
            return f"the parameter {name} has no name for its callers (/)"
        if name == "self" and name not in hints:  # a method
            continue
        if name not in hints:
            return f"the parameter {name} has no type"
        if not _is_json(hints[name]):
            return f"the type of {parameter} has no form in JSON"
    return None


def _is_json(hint: Any) -> bool:
    """Whether a type has a form in JSON. transformers describes a class that it does not
    know as an object."""
    if get_origin(hint) is Literal:
        return True
    if parts := get_args(hint):
        return all(part is ... or _is_json(part) for part in parts)
    return hint in _PLAIN or is_typeddict(hint)


async def call(function: Function, *args: Any, **kwargs: Any) -> Any:
    """Call a function or coroutine and return its value. Each function gets a thread of its own,
    which ends by itself or with the process, so threads that hang cannot fill a pool."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    return await in_daemon(finish, function, args, kwargs)


def finish(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function. Raises its error, but none that ends the event loop or the process."""
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        # a SystemExit would end the event loop, and a future cannot hold a StopIteration
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise RuntimeError(repr(error)) from error
