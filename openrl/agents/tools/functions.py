"""Typed, documented Python functions as tools."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

from transformers.utils import get_json_schema

from openrl.agents.base import ToolError, Toolset
from openrl.errors import UserError
from openrl.processes.worker import load_module
from openrl.vision.parts import Content, with_pictures

Function = Callable[..., Any]
_PLAIN = (int, float, str, bool, type(None), list, tuple, dict, Any)
SHAPE = 'def f(text: str) -> str with """What it does.  Args:  text: What it is.""" in it'


@dataclass(frozen=True)
class ToolMark:
    """What a function that is marked as a tool says of itself, as its attribute ``tool_mark``."""

    name: str | None = None
    description: str | None = None
    schema: Mapping[str, Any] | None = None


class FunctionTools(Toolset):
    """Functions; coroutines are awaited, others run in a thread."""

    def __init__(self, functions: Sequence[Function]) -> None:
        """Raises UserError for one whose signature and docstring make no schema."""
        self.schemas = [schema_of(function) for function in functions]
        names = [schema["function"]["name"] for schema in self.schemas]
        self._functions = dict(zip(names, functions, strict=True))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        return await result_of(self._functions[name], arguments)


async def result_of(function: Function, arguments: Mapping[str, Any]) -> Content:
    """What a tool returns, as text where it is no picture. Raises ToolError if it raises
    anything."""
    try:
        value = await call(function, **arguments)
        return with_pictures(value) or as_text(value)
    except ToolError:
        raise
    except Exception as error:
        raise ToolError(f"{type(error).__name__}: {error}") from error


def load_file(path: Path) -> ModuleType:
    """Raises UserError if there is no such file or it fails."""
    if not path.expanduser().is_file():
        raise UserError(f"--tools: there is no file {path}")
    try:
        return load_module(path.expanduser().resolve(), f"openrl_tools_{path.stem}")
    except Exception as error:  # the user's code
        raise UserError(f"--tools: {path} fails: {type(error).__name__}: {error}") from error


def functions_of(module: ModuleType) -> list[Function]:
    """The functions that it marks as tools, else the public ones that it defines."""
    own: list[Function] = [
        value
        for value in vars(module).values()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    marked = [function for function in own if hasattr(function, "tool_mark")]
    return marked or [function for function in own if not function.__name__.startswith("_")]


def schema_of(function: Function) -> dict[str, Any]:
    """As chat templates take it. Raises UserError that names what is missing."""
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
        reason = _unfit_parameter(function)
        schema: dict[str, Any] = {} if reason else get_json_schema(function)
    except Exception as error:  # of transformers, or of annotations that do not resolve
        reason = str(error.args[0]) if error.args else type(error).__name__
    if reason:
        raise UserError(
            f"{name} makes no tool: {reason}",
            f"{SHAPE}; or call it _{name} if it is no tool",
        )
    return schema


def _unfit_parameter(function: Function) -> str | None:
    """What is wrong with the types of its parameters."""
    hints = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return f"{parameter} stands for any number of arguments"
        if name == "self" and name not in hints:  # of a method
            continue
        if name not in hints:
            return f"the parameter {name} has no type"
        if not _is_json(hints[name]):
            return f"the type of {parameter} has no form in JSON"
    return None


def _is_json(hint: Any) -> bool:
    """transformers would call a class that it does not know an object."""
    if get_origin(hint) is Literal:
        return True
    if parts := get_args(hint):
        return all(part is ... or _is_json(part) for part in parts)
    return hint in _PLAIN or is_typeddict(hint)


async def call(function: Function, *args: Any, **kwargs: Any) -> Any:
    """What a function or coroutine returns. A thread that is not waited for any more ends by
    itself or with the process: no pool can fill with those that hang."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            # the loop would end with a SystemExit, and takes no StopIteration
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            future.set_exception(error if plain else RuntimeError(repr(error)))

    threading.Thread(target=work, daemon=True, name=f"tool {function.__name__}").start()
    return await asyncio.wrap_future(future)


def as_text(value: Any) -> str:
    """Text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
