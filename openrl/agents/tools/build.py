"""From --tools to the tools of an episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from openrl.agents.base import Toolset
from openrl.agents.foreign.shims import install_shims
from openrl.agents.tools import verl_modules
from openrl.agents.tools.functions import SHAPE, FunctionTools, functions_of, load_file
from openrl.agents.tools.mcp import McpServer
from openrl.agents.tools.sandbox import python
from openrl.agents.tools.toolbox import Toolbox
from openrl.agents.tools.verl import VerlTools, tools_of_config, tools_of_module
from openrl.errors import UserError

OpenToolset = Callable[[], Toolset]


async def open_toolbox(tools: str, timeout: float) -> Callable[[], Toolbox]:
    """What makes the tools of an episode, of --tools: files, URLs and names with commas between.
    ``timeout`` is in seconds of one call.

    Raises UserError for what cannot be had, and for two tools of one name."""
    sources = [source for part in tools.split(",") for source in await toolsets(part.strip())]
    return toolbox_of(sources, timeout)


def toolbox_of(sources: Sequence[OpenToolset], timeout: float) -> Callable[[], Toolbox]:
    """As ``open_toolbox``, of toolsets that are there."""

    def make() -> Toolbox:
        return Toolbox([source() for source in sources], timeout)

    make()  # says whether names clash
    return make


async def toolsets(part: str) -> list[OpenToolset]:
    """Of one of the parts of --tools. Raises UserError."""
    if part == "python":
        return [_shared([python])]
    if part.startswith(("http://", "https://")):
        return [(await McpServer.find(part)).toolset]
    install_shims(verl_modules.MODULES)
    if part.endswith(".py"):
        return _of_file(Path(part))
    if part.endswith((".yaml", ".yml")):
        return [partial(VerlTools, tools_of_config(Path(part)))]
    raise UserError(
        f"--tools: {part!r} is no source of tools",
        "FILE.py, http://HOST:PORT/mcp, python, or verl's FILE.yaml",
    )


def _of_file(path: Path) -> list[OpenToolset]:
    """verl's classes in a Python file, and its functions; beside classes only those marked."""
    module = load_file(path)
    classes, functions = tools_of_module(module), functions_of(module)
    if classes:
        functions = [function for function in functions if hasattr(function, "tool_mark")]
    if not classes and not functions:
        raise UserError(f"--tools: {path} defines no public function", SHAPE)
    of_classes: list[OpenToolset] = [partial(VerlTools, classes)] if classes else []
    return [*of_classes, *([_shared(functions)] if functions else [])]


def _shared(functions: Sequence[Callable[..., object]]) -> OpenToolset:
    toolset = FunctionTools(functions)  # functions remember nothing of an episode
    return lambda: toolset
