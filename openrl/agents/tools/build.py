"""Builds the tools of an episode from --tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from jsonschema import SchemaError

from openrl.agents.base import Toolset
from openrl.agents.files.stand_ins import install_stand_ins
from openrl.agents.interfaces import ToolFiles
from openrl.agents.tools.functions import SHAPE, FunctionTools, functions_of, load_file
from openrl.agents.tools.sandbox import python
from openrl.agents.tools.toolbox import Toolbox, validator_of
from openrl.errors import UserError
from openrl.extension_points import tool_files
from openrl.files import expanded, file_and_name
from openrl.registry import resolve

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
    install_stand_ins()
    file, name = file_and_name(part)
    path = expanded(file)
    readers = {".py": partial(_toolsets_of_file, name=name)} | {
        ending: _reader(files) for files in _files_elsewhere() for ending in files.endings
    }
    if path.suffix not in readers:
        *known, last = ["FILE.py[:NAME]", "http://HOST:PORT/mcp", "python"] + [
            files.example for files in _files_elsewhere()
        ]
        remedy = f"{', '.join(known)}, or {last}"
        raise UserError(f"--tools: {part!r} is not a source of tools", remedy)
    if not path.is_file():
        raise UserError(f"--tools: there is no file {file}")
    return readers[path.suffix](path)


def _files_elsewhere() -> list[ToolFiles]:
    return [entry.component for entry in tool_files.entries()]


def _reader(files: ToolFiles) -> Callable[[Path], list[OpenToolset]]:
    return lambda path: [resolve(files.read_file)(path)]


def _toolsets_of_file(path: Path, name: str | None) -> list[OpenToolset]:
    """Return a file's functions and the classes of other systems, or the one of that name. If there
    are classes, functions count only if they are marked as tools."""
    module = load_file(path)
    read = [resolve(files.read_module)(module, name) for files in _files_elsewhere()]
    classes = [toolset for toolset in read if toolset is not None]
    functions = functions_of(module, name)
    if name is not None and not classes and not functions:
        known = ", ".join(function.__name__ for function in functions_of(module))
        raise UserError(f"--tools: {path} has no tool named {name}", f"one of {known}")
    if classes:
        functions = [function for function in functions if hasattr(function, "tool_mark")]
    if not classes and not functions:
        raise UserError(f"--tools: {path} defines no public function", SHAPE)
    return [*classes, *([_function_toolset(functions, path)] if functions else [])]


def _function_toolset(
    functions: Sequence[Callable[..., object]], file: Path | None = None
) -> OpenToolset:
    toolset = FunctionTools(functions, file)  # functions keep no state, so all episodes share them
    return lambda: toolset
