"""All tools of an episode, with checked arguments and limits on time and length."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from openrl.agents.base import ToolError, Toolset
from openrl.agents.time_limits import time_limit
from openrl.errors import UserError
from openrl.types import Prompt
from openrl.vision.parts import Content

LONGEST_RESULT = 8000  # characters
_LONGEST_COMPLAINT = 300  # characters

T = TypeVar("T")


class Toolbox(Toolset):
    """Several toolsets as one. ``timeout`` is the seconds for one call; 0 means no limit. It also
    limits ``start``, ``reward`` and ``close``, which raise RuntimeError when it is over."""

    def __init__(self, toolsets: Sequence[Toolset], timeout: float) -> None:
        """Raises UserError if two tools have the same name."""
        self.toolsets, self.timeout = toolsets, timeout
        self.schemas = [schema for toolset in toolsets for schema in toolset.schemas]
        self.cut = 0  # results that were too long
        self._homes: dict[str, Toolset] = {}
        for toolset in toolsets:
            for schema in toolset.schemas:
                name = schema["function"]["name"]
                if name in self._homes:
                    raise UserError(f"--tools: two tools are called {name}", "rename one of them")
                self._homes[name] = toolset
        self._parameters = {
            schema["function"]["name"]: {
                "type": "object",
                "additionalProperties": False,
                **_with_null(schema["function"].get("parameters") or {}),
            }
            for schema in self.schemas
        }

    async def start(self, prompt: Prompt) -> str:
        added = [await self._in_time("start", toolset.start(prompt)) for toolset in self.toolsets]
        return "".join(added)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        """Call a tool and return its result, with long texts cut. Raises ToolError."""
        self._check(name, arguments)
        result = await self._in_time(name, self._homes[name].call(name, arguments), ToolError)
        if isinstance(result, str):
            return self._cut(result)
        return [p | {"text": self._cut(p["text"])} if p["type"] == "text" else p for p in result]

    def _cut(self, text: str) -> str:
        if len(text) <= LONGEST_RESULT:
            return text
        self.cut += 1
        return f"{text[:LONGEST_RESULT]}\n[cut: the result has {len(text)} characters]"

    async def reward(self) -> float | None:
        """Return the sum of the rewards of the toolsets that give one; None if none does."""
        rewards = [await self._in_time("reward", toolset.reward()) for toolset in self.toolsets]
        given = [reward for reward in rewards if reward is not None]
        return sum(given) if given else None

    @property
    def metrics(self) -> dict[str, float]:
        given = [toolset.metrics for toolset in self.toolsets]
        joined = {name: value for metrics in given for name, value in metrics.items()}
        return {"cut_tool_results": float(self.cut), **joined}

    async def close(self) -> None:
        ends = (self._in_time("close", toolset.close()) for toolset in self.toolsets)
        results = await asyncio.gather(*ends, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _in_time(
        self, name: str, answer: Awaitable[T], late: type[Exception] = RuntimeError
    ) -> T:
        message = f"{name} gave no answer within {self.timeout:g} s"
        async with time_limit(self.timeout, late(message)):
            return await answer

    def _check(self, name: str, arguments: Mapping[str, Any]) -> None:
        if name not in self._homes:
            known = ", ".join(self._homes)
            raise ToolError(f"there is no tool {name[:_LONGEST_COMPLAINT]!r}, only {known}")
        validator = validator_of(self._parameters[name])(self._parameters[name])
        complaints = [error.message for error in validator.iter_errors(dict(arguments))]
        if complaints:
            raise ToolError(f"{name}: {'; '.join(sorted(complaints))}"[:_LONGEST_COMPLAINT])


def validator_of(schema: Any) -> Any:
    """Return the class that validates by a schema: of the draft in its "$schema", or else of
    2020-12, as MCP has it."""
    return validator_for(schema, Draft202012Validator)


def _with_null(schema: Any) -> Any:
    """Allow null where a schema says "nullable", which is unknown to JSON Schema."""
    if isinstance(schema, list):
        return [_with_null(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    plain = {key: _with_null(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain
