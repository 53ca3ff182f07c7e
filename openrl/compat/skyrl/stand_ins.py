"""Stand-ins for the modules that files of SkyRL's environments import, where SkyRL is not
installed: base classes with the fields and methods that environments use, and omegaconf's
dictionary, the type of their settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

Observation = TypeVar("Observation")
Action = TypeVar("Action")


class BaseEnv(Generic[Observation, Action]):
    def close(self) -> None:
        """Nothing is held here; an environment that holds something overrides this."""


Env = BaseEnv
"""The name that files import."""


class BaseTextEnv(BaseEnv[list, str]):
    def __init__(self) -> None:
        self.turns, self.max_turns = 0, 1
        self.init_tool_groups([])

    def init_tool_groups(self, tool_groups: Sequence[ToolGroup] = ()) -> None:
        self.tool_groups = list(tool_groups)
        pairs = [group.get_tool_to_group_mapping() for group in self.tool_groups]
        self.tool_to_toolgroup = {tool: name for names in pairs for tool, name in names.items()}

    def _init_tool_groups(self, tool_groups: Sequence[ToolGroup] = ()) -> None:
        """In early versions the name has an underscore."""
        self.init_tool_groups(tool_groups)

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Any) -> Any:
        for group in self.tool_groups:
            if group.name == tool_group_name:
                return group.execute_tool(tool_name, *tool_input)
        raise ValueError(f"there is no group of tools named {tool_group_name!r}")

    def init(self, prompt: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        return prompt, {}

    def get_metrics(self) -> dict[str, Any]:
        return {}

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, Any]:
        return {}


BaseTextEnvStepOutput = dict
ConversationType = list
MessageType = dict


class tool:
    """Marks a method of a group as a tool."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func, self.name = func, func.__name__

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else self.func.__get__(instance, owner)


class ToolGroup:
    """Methods with ``tool``, by their names."""

    def __init__(self, name: str) -> None:
        self.name = name
        marked = [
            value for n in dir(type(self)) if isinstance(value := getattr(type(self), n), tool)
        ]
        self._tools = {mark.name: mark.__get__(self) for mark in marked}

    def get_name(self) -> str:
        return self.name

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        return self._tools.get(name)

    def get_tool_names(self) -> list[str]:
        return list(self._tools)

    def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in self._tools:
            raise ValueError(f"the group {self.name!r} has no tool {name!r}")
        return self._tools[name](*args, **kwargs)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        return dict.fromkeys(self._tools, self.name)


def register(id: str, entry_point: Any = None, **kwargs: Any) -> None:
    """SkyRL's registry of environments, which nobody asks here: the file names its class."""


class DictConfig(dict):
    """A dictionary whose keys are attributes as well, also those of the dictionaries in it."""

    def __init__(self, content: Mapping[str, Any] | None = None) -> None:
        super().__init__({key: as_config(value) for key, value in (content or {}).items()})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no setting {name!r} (--env_config)") from None


def as_config(value: Any) -> Any:
    if isinstance(value, Mapping):
        return DictConfig(value)
    return [as_config(item) for item in value] if isinstance(value, list) else value
