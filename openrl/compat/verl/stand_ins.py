"""Stand-ins for the modules that files with verl's tools import, where verl is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from pydantic import BaseModel

from openrl.agents.tools.functions import ToolMark


class Schema(BaseModel, extra="allow"):
    """Holds whatever a JSON schema may say."""


class OpenAIFunctionPropertySchema(Schema):
    type: Any = None


class OpenAIFunctionParametersSchema(Schema):
    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(Schema):
    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema


class OpenAIFunctionToolSchema(Schema):
    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class BaseTool:
    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        pass


def function_tool(name: Any = None, *, description: str | None = None, schema: Any = None) -> Any:
    """Mark a function as a tool. The decorator works with and without arguments."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        given = schema.model_dump(exclude_none=True) if isinstance(schema, BaseModel) else schema
        own = name if isinstance(name, str) else None
        vars(function)["tool_mark"] = ToolMark(own, description, given)
        return function

    return mark(name) if callable(name) else mark


def rollout_trace_op(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
