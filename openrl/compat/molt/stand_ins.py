"""Stand-ins for Molt's modules that agent files import: base classes, which tell what a class is
for."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass
class Result:
    reward: Any = 0.0
    observation: str = ""
    terminated: bool = True
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    score: Any = None
    images: list[Any] | None = None
    sampling_params: Any = None


class Env:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def reset(self, state: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return state

    async def close(self) -> None:
        pass


class ChatAgent:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class Runner:
    """The base of classes that name what they would run."""


class StepEnvRunner(Runner):
    def __init__(self, env_cls: type) -> None:
        self.env_cls = env_cls


class ChatAgentRunner(Runner):
    def __init__(self, agent_cls: type) -> None:
        self.agent_cls = agent_cls


class ChatContext(SimpleNamespace):
    """The argument of ``ChatAgent.run``."""
