"""verl's tools: classes with ``create``, ``execute``, ``calc_reward`` and ``release``, found in a
Python file or named in a YAML file, and functions with ``@function_tool``.

An episode has one instance of a class, from the first call to the end. The rewards of tools become
metrics; as in verl, they are not the episode's score."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from openrl.agents.base import ToolError, Toolset
from openrl.agents.tools.build import OpenToolset
from openrl.agents.tools.processes import wants_main_thread
from openrl.errors import UserError
from openrl.types import Prompt
from openrl.vision.parts import Content, Part, as_text

METHODS = ("create", "execute", "release")


class VerlTools(Toolset):
    """The tools of one episode."""

    def __init__(self, tools: Sequence[Any]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self.schemas = [_plain(tool.tool_schema) for tool in tools]
        self._kwargs: Mapping[str, Any] = {}
        self._instances: dict[str, Any] = {}
        self._turn = asyncio.Lock()
        self._metrics: dict[str, float] = defaultdict(float)

    async def start(self, prompt: Prompt) -> str:
        inner = prompt.meta.get("extra_info")
        row = {**prompt.meta, **(inner if isinstance(inner, Mapping) else {})}
        self._kwargs = row.get("tools_kwargs") or {}
        return ""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        tool = self._tools[name]
        try:
            instance = await self._instance(name)
            kwargs = self._of_row(name, "execute_kwargs")
            answer = await tool.execute(instance, dict(arguments), **kwargs)
        except Exception as error:
            if wants_main_thread(error):
                message = f"--tools: {name} sets signals, which only the main thread may"
                raise UserError(message, "asyncio.timeout in its place, or a function") from error
            raise ToolError(f"{type(error).__name__}: {error}") from error
        response, reward, metrics = answer
        self._count(name, {"reward": reward, **(metrics or {})})
        return _content(response)

    async def reward(self) -> float | None:
        for name, instance in self._instances.items():
            kwargs = self._of_row(name, "calc_reward_kwargs")
            final = await self._tools[name].calc_reward(instance, **kwargs)
            self._count(name, {"final_reward": final})
        return None

    @property
    def metrics(self) -> Mapping[str, float]:
        """The sums over the episode, named tool/NAME/METRIC."""
        return dict(self._metrics)

    async def close(self) -> None:
        while self._instances:
            name, instance = self._instances.popitem()
            await self._tools[name].release(instance, **self._of_row(name, "release_kwargs"))

    async def _instance(self, name: str) -> Any:
        async with self._turn:
            if name not in self._instances:
                kwargs = self._of_row(name, "create_kwargs")
                made = await self._tools[name].create(create_kwargs=kwargs, **kwargs)
                self._instances[name] = made[0] if isinstance(made, tuple) else made
            return self._instances[name]

    def _of_row(self, name: str, kind: str) -> dict[str, Any]:
        return dict((self._kwargs.get(name) or {}).get(kind) or {})

    def _count(self, name: str, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, int | float):
                self._metrics[f"tool/{name}/{key}"] += value


def read_config(path: Path) -> OpenToolset:
    """Read a YAML file. Raises UserError."""
    return partial(VerlTools, tools_of_config(path))


def read_module(module: ModuleType, name: str | None = None) -> OpenToolset | None:
    """Read the classes of a Python file, or the one of that name; None if it has none. Raises
    UserError."""
    tools = tools_of_module(module, name)
    return partial(VerlTools, tools) if tools else None


def tools_of_config(path: Path) -> list[Any]:
    """Return the tools that a YAML file names, as tools: [{class_name, config, tool_schema}].
    Raises UserError."""
    sys.path[:0] = [str(path.resolve().parent), str(Path.cwd())]
    tools = []
    try:
        rows = yaml.safe_load(path.read_text(encoding="utf-8"))["tools"]
        for row in rows:
            module, _, name = row["class_name"].rpartition(".")
            made = getattr(importlib.import_module(module), name)
            tools.append(made(row.get("config") or {}, _schema(row.get("tool_schema"))))
    except (Exception, SystemExit) as error:  # from the file, or from the user's code
        raise UserError(
            f"--tools: {path}: {type(error).__name__}: {error}",
            "verl's form: tools: [{class_name: module.Class, config: {}, tool_schema: {..}}]",
        ) from error
    return tools


def tools_of_module(module: ModuleType, name: str | None = None) -> list[Any]:
    """Make a module's tools, or the one of that name, without configurations. Raises UserError for
    one that needs one."""
    classes = [
        value
        for key, value in vars(module).items()
        if name in (None, key)
        and isinstance(value, type)
        and value.__module__ == module.__name__
        and all(inspect.iscoroutinefunction(getattr(value, name, None)) for name in METHODS)
    ]
    try:
        return [made({}, None) for made in classes]
    except Exception as error:  # the user's code
        raise UserError(
            f"--tools: {module.__file__}: {type(error).__name__}: {error}",
            "name the class in verl's YAML file, with its configuration and schema",
        ) from error


def _schema(given: Any) -> Any:
    schemas = importlib.import_module("verl.tools.schemas")  # verl's own, or our stand-in
    return None if given is None else schemas.OpenAIFunctionToolSchema.model_validate(given)


def _plain(schema: Any) -> dict[str, Any]:
    if isinstance(schema, Mapping):
        return dict(schema)
    plain: dict[str, Any] = schema.model_dump(exclude_unset=True, exclude_none=True)
    return plain


def _content(response: Any) -> Content:
    """Return a response as content. It is a text, a dict or a ToolResponse, which may hold images;
    a video becomes "[video]"."""
    if isinstance(response, str):
        return as_text(response)
    held = response if isinstance(response, Mapping) else vars(response)
    seen = ["[video]"] if held.get("video") else []
    text = "\n".join([as_text(held.get("text") or ""), *seen]).strip("\n")
    shown: list[Part] = [{"type": "image", "image": image} for image in held.get("image") or []]
    return [*shown, {"type": "text", "text": text}] if shown else text
