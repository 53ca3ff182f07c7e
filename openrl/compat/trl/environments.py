"""TRL's environment classes: ``reset`` begins an episode, other methods are tools, and there may be
a reward. Runs in the file's process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openrl.agents.base import ToolError
from openrl.agents.files import user_code
from openrl.agents.files.adapter import Adapter
from openrl.agents.tools.functions import Function, finish, schema_of
from openrl.compat.trl.entries import tool_methods
from openrl.errors import UserError
from openrl.processes.interfaces import takes
from openrl.types import Prompt
from openrl.vision.parts import Content, shown


class ToolAdapter(Adapter):
    """Each episode has an object of the class."""

    def __init__(self, made: type) -> None:
        """Makes an object, since a class may have its methods only after that. Raises UserError."""
        super().__init__(made)
        self._object: Any = None  # that of the episode
        tools = tool_methods(type(made()))
        if not tools:
            raise UserError(
                f"--agent_func_path: {made.__name__} has no method that can be a tool",
                "a public method with types and a docstring",
            )
        self.schemas = [schema_of(tool) for tool in tools]
        self.rewards = hasattr(made, "get_reward")

    def start(self, prompt: Prompt) -> str:
        """Make the episode's object and return what its ``reset`` says."""
        self._object = self._call(self._class)
        opening = self._call(self._object.reset, **_row(prompt, self._object.reset))
        if not isinstance(opening, str | None):
            name = self._class.__name__
            raise TypeError(f"{name}.reset must return text or None, not {type(opening).__name__}")
        return opening or ""

    def use(self, name: str, arguments: Mapping[str, Any]) -> tuple[Content, bool]:
        """Call a tool. Return what it says, and whether it failed."""
        try:
            return shown(self._call(getattr(self._object, name), **arguments)), False
        except ToolError as error:
            return str(error), True
        except Exception as error:
            return f"{type(error).__name__}: {error}", True

    def reward(self) -> float | None:
        if not self.rewards:
            return None
        return user_code.scalar(self._call(self._object.get_reward), "the reward")

    def _call(self, function: Function, **arguments: Any) -> Any:
        return self.result(finish(function, (), arguments))


def _row(prompt: Prompt, reset: Function) -> dict[str, Any]:
    """Return the columns of the prompt's row that ``reset`` takes."""
    chat = user_code.chat_for_clients(prompt) if prompt.messages else prompt.text
    row = {**prompt.meta, "prompt": chat, "label": prompt.label}
    return {name: value for name, value in row.items() if takes(reset, name)}
