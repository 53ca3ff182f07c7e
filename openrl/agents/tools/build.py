"""From --tools to the tools of an episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from openrl.agents.base import Toolset
from openrl.agents.tools.functions import FunctionTools, functions_of
from openrl.agents.tools.mcp import McpServer
from openrl.agents.tools.sandbox import python
from openrl.agents.tools.toolbox import Toolbox
from openrl.errors import UserError

OpenToolset = Callable[[], Toolset]


async def open_toolbox(tools: str, timeout: float) -> Callable[[], Toolbox]:
    """What makes the tools of an episode, of --tools: files, URLs and names with commas between.
    ``timeout`` is in seconds of one call.

    Raises UserError for what cannot be had, and for two tools of one name."""
    sources = [await toolset_source(part.strip()) for part in tools.split(",")]
    return toolbox_of(sources, timeout)


def toolbox_of(sources: Sequence[OpenToolset], timeout: float) -> Callable[[], Toolbox]:
    """As ``open_toolbox``, of toolsets that are there."""

    def make() -> Toolbox:
        return Toolbox([source() for source in sources], timeout)

    make()  # says whether names clash
    return make


async def toolset_source(part: str) -> OpenToolset:
    """One of the parts of --tools. Raises UserError."""
    if part == "python":
        return _shared([python])
    if part.startswith(("http://", "https://")):
        return (await McpServer.find(part)).toolset
    if part.endswith(".py"):
        return _shared(functions_of(Path(part)))
    raise UserError(
        f"--tools: {part!r} is no source of tools", "FILE.py, http://HOST:PORT/mcp or python"
    )


def _shared(functions: Sequence[Callable[..., object]]) -> OpenToolset:
    toolset = FunctionTools(functions)  # functions remember nothing of an episode
    return lambda: toolset
