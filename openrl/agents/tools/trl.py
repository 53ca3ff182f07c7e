"""TRL's environment classes: ``reset`` begins an episode, other methods are tools, and there may be
a reward."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from openrl.agents.base import Toolset
from openrl.agents.foreign.calls import chat_for_clients
from openrl.agents.tools.functions import Function, call, result_of, schema_of
from openrl.errors import UserError
from openrl.types import Prompt
from openrl.vision.parts import Content

_NOT_TOOLS = ("reset", "get_reward")


def is_trl_environment(made: type) -> bool:
    """Whether a class is TRL's: it has ``reset``, other methods as tools, and either
    ``get_reward()``, or ``reset(**row)`` and only documented tools. Classes with ``step`` but
    without ``get_reward`` are gym's."""
    methods = dict(inspect.getmembers(made, inspect.isfunction))
    if "reset" not in methods or not (tools := _tools(made)):
        return False
    if "get_reward" in methods:
        return True
    takes_rows = any(
        parameter.kind is parameter.VAR_KEYWORD
        for parameter in inspect.signature(methods["reset"]).parameters.values()
    )
    documented = all(inspect.getdoc(tool) for tool in tools.values())
    return "step" not in methods and takes_rows and documented


def trl_tools(made: type) -> Callable[[], TrlTools]:
    """Return a function that makes the tools of an episode. This makes one object, because a class
    may have its methods only after that. Raises UserError for a method that cannot be a tool."""
    tools = _tools(type(made()))
    if not tools:
        raise UserError(
            f"--agent_func_path: {made.__name__} has no method that can be a tool",
            "a public method with types and a docstring",
        )
    return partial(TrlTools, made, [schema_of(tool) for tool in tools.values()])


class TrlTools(Toolset):
    """The tools of one episode, which has an object of its own."""

    def __init__(self, made: type, schemas: list[dict[str, Any]]) -> None:
        self.made, self.schemas = made, schemas
        self._object: Any = None
        self._turn = asyncio.Lock()  # methods that run in threads take turns with the object

    async def start(self, prompt: Prompt) -> str:
        """Make the episode's object and return what its ``reset`` says."""
        self._object = await call(self.made)
        said = await call(self._object.reset, **_row(prompt, self._object.reset))
        if not isinstance(said, str | None):
            name = self.made.__name__
            raise TypeError(f"{name}.reset must return text or None, not {type(said).__name__}")
        return said or ""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        method = getattr(self._object, name)
        if inspect.iscoroutinefunction(method):
            return await result_of(method, arguments)
        async with self._turn:
            return await result_of(method, arguments)

    async def reward(self) -> float | None:
        if not hasattr(self._object, "get_reward"):
            return None
        return float(await call(self._object.get_reward))


def _tools(made: type) -> dict[str, Function]:
    return {
        name: method
        for name, method in inspect.getmembers(made, inspect.isfunction)
        if name not in _NOT_TOOLS and not name.startswith("_")
    }


def _row(prompt: Prompt, reset: Function) -> dict[str, Any]:
    """Return the columns of the prompt's row that ``reset`` takes."""
    asked = chat_for_clients(prompt) if prompt.messages else prompt.text
    row = {**prompt.meta, "prompt": asked, "label": prompt.label}
    parameters = inspect.signature(reset).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return row
    return {name: value for name, value in row.items() if name in parameters}
