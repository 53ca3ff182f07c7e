"""Builds the tools of an episode from --tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from jsonschema import SchemaError

from openrl.agents.base import Toolset
from openrl.agents.foreign.shims import install_shims
from openrl.agents.tools import verl_modules
from openrl.agents.tools.functions import SHAPE, FunctionTools, functions_of, load_file
from openrl.agents.tools.sandbox import python
from openrl.agents.tools.toolbox import Toolbox, validator_of
from openrl.agents.tools.verl import VerlTools, tools_of_config, tools_of_module
from openrl.errors import UserError
from openrl.files import expanded

OpenToolset = Callable[[], Toolset]


async def open_toolbox(tools: str, timeout: float) -> Callable[[], Toolbox]:
    """Return a function that makes the tools of an episode. ``tools`` is the value of --tools:
    files, URLs and names, separated by commas. ``timeout`` is the seconds for one call.

    Raises UserError for tools that cannot be opened, for two tools of the same name and for
    parameters that no call could be checked against."""
    sources = [source for part in tools.split(",") for source in await toolsets(part.strip())]

    def make() -> Toolbox:
        return Toolbox([source() for source in sources], timeout)

    for function in (schema["function"] for schema in make().schemas):  # raises if names clash
        try:
            validator_of(parameters := function.get("parameters") or {}).check_schema(parameters)
        except SchemaError as error:
            message = f"--tools: the parameters of {function['name']} are no JSON schema"
            raise UserError(f"{message}: {error.message}") from error
    return make


async def toolsets(part: str) -> list[OpenToolset]:
    """Return the toolsets of one part of --tools. Raises UserError."""
    if part == "python":
        return [_function_toolset([python])]
    if part.startswith(("http://", "https://")):
        from openrl.agents.tools.mcp import find_tools  # its library takes a second to import

        return [await find_tools(part)]
    install_shims(verl_modules.MODULES)
    path = expanded(part)
    if path.suffix in (".py", ".yaml", ".yml"):
        if not path.is_file():
            raise UserError(f"--tools: there is no file {part}")
        if path.suffix == ".py":
            return _toolsets_of_file(path)
        return [partial(VerlTools, tools_of_config(path))]
    raise UserError(
        f"--tools: {part!r} is not a source of tools",
        "FILE.py, http://HOST:PORT/mcp, python, or verl's FILE.yaml",
    )


def _toolsets_of_file(path: Path) -> list[OpenToolset]:
    """Return a file's classes of verl and its functions. If there are classes, functions count only
    if they are marked as tools."""
    module = load_file(path)
    classes, functions = tools_of_module(module), functions_of(module)
    if classes:
        functions = [function for function in functions if hasattr(function, "tool_mark")]
    if not classes and not functions:
        raise UserError(f"--tools: {path} defines no public function", SHAPE)
    of_classes: list[OpenToolset] = [partial(VerlTools, classes)] if classes else []
    return [*of_classes, *([_function_toolset(functions)] if functions else [])]


def _function_toolset(functions: Sequence[Callable[..., object]]) -> OpenToolset:
    toolset = FunctionTools(functions)  # functions keep no state, so all episodes share them
    return lambda: toolset
