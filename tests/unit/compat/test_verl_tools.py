"""Tools as they are written for verl: classes, a YAML file that names them, marked functions."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from openrl.agents.base import ToolError
from openrl.agents.tools.build import open_toolbox
from openrl.errors import UserError
from openrl.types import Prompt

CLASSES = """
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

released = []


class GradeTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instances = {}

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        truth = kwargs.get("ground_truth") or kwargs.get("create_kwargs", {}).get("ground_truth")
        self._instances[instance_id] = {"truth": truth, "reward": 0.0}
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        mine = self._instances[instance_id]
        better = float(parameters["answer"] == mine["truth"]) > mine["reward"]
        mine["reward"] = float(parameters["answer"] == mine["truth"])
        text = f"{self.config.get('word', 'reward')} {mine['reward']}"
        return ToolResponse(text=text), 0.0 if better else -0.05, {"seen": 1}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return self._instances[instance_id]["reward"]

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instances[instance_id]
        released.append(instance_id)


class PictureTool(BaseTool):
    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema.model_validate({
            "type": "function",
            "function": {
                "name": "look",
                "description": "Looks.",
                "parameters": {"type": "object", "properties": {}, "required": []},
            },
        })

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        return {"text": "A cat.", "image": [b"png"]}, 0.0, {}
"""
SCHEMA = """
    tool_schema:
      type: function
      function:
        name: grade
        description: Grades an answer.
        parameters:
          type: object
          properties:
            answer: {type: string, description: The answer., enum: ["4", "5"]}
          required: [answer]
"""
CONFIG = f"""
tools:
  - class_name: verl_classes.GradeTool
    config: {{type: native, word: graded}}{SCHEMA}
  - class_name: verl_classes.PictureTool
    config: {{type: native}}
"""
FUNCTIONS = '''
from verl.tools.function_tool import function_tool


@function_tool
def double(x: int) -> int:
    """Doubles.

    Args:
        x: A number.
    """
    return 2 * x


@function_tool("search", description="Searches.")
async def find(query: str) -> str:
    """Finds.

    Args:
        query: What to find.
    """
    return f"found {query}"


@function_tool(name="free", schema={
    "type": "function",
    "function": {"name": "free", "description": "Takes all.", "parameters": {"type": "object",
        "additionalProperties": True}},
})
def anything(**kwargs):
    return sorted(kwargs)


def helper(x):
    return x
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "verl_classes.py").write_text(CLASSES)
    (tmp_path / "verl_functions.py").write_text(FUNCTIONS)
    (tmp_path / "tools.yaml").write_text(CONFIG)
    return tmp_path


def test_parameters_that_are_no_schema_are_refused_before_the_first_call(tmp_path):
    """A call could only be answered with jsonschema's own error, in every episode anew."""
    path = tmp_path / "tools.py"
    path.write_text(FUNCTIONS.replace('"type": "object"', '"type": "any"'))
    with pytest.raises(UserError, match="the parameters of free are no JSON schema: 'any' is not"):
        asyncio.run(open_toolbox(str(path), 5.0))


def test_parameters_are_checked_by_the_draft_that_they_name(tmp_path):
    """Draft 7 has a schema for each item of a list; 2020-12 calls that prefixItems."""
    pair = """"$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
        "properties": {"pair": {"items": [{"type": "string"}, {"type": "integer"}]}}"""
    path = tmp_path / "tools.py"
    path.write_text(FUNCTIONS.replace('"type": "object"', pair))

    async def calls():
        toolbox = (await open_toolbox(str(path), 5.0))()
        assert await toolbox.call("free", {"pair": ["a", 1]}) == '["pair"]'
        with pytest.raises(ToolError, match="'b' is not of type 'integer'"):
            await toolbox.call("free", {"pair": ["a", "b"]})

    asyncio.run(calls())


def row(kwargs):
    return Prompt("a", [1], "", meta={"extra_info": {"tools_kwargs": kwargs}})


def test_classes_that_a_file_names(folder):
    async def episode(make, answers):
        toolbox = make()
        await toolbox.start(row({"grade": {"create_kwargs": {"ground_truth": "4"}}}))
        texts = [await toolbox.call("grade", {"answer": answer}) for answer in answers]
        reward = await toolbox.reward()
        metrics = dict(toolbox.metrics)
        await toolbox.close()
        return texts, reward, metrics

    async def play():
        make = await open_toolbox(str(folder / "tools.yaml"), 5.0)
        one, other = await asyncio.gather(episode(make, ["5", "4"]), episode(make, ["5"]))
        toolbox = make()
        look = await toolbox.call("look", {})
        with pytest.raises(ToolError, match="'6' is not one of"):
            await toolbox.call("grade", {"answer": "6"})
        with pytest.raises(ToolError, match="answer"):
            await toolbox.call("grade", {})
        await toolbox.close()
        return one, other, look, toolbox.schemas

    one, other, look, schemas = asyncio.run(play())
    # the second answer is better than the first, which is better than nothing only if it is right
    assert one[:2] == (["graded 0.0", "graded 1.0"], None)
    assert one[2] == {
        "tool/grade/reward": -0.05,
        "tool/grade/seen": 2.0,
        "tool/grade/final_reward": 1.0,
        "cut_tool_results": 0.0,
    }
    assert other[0] == ["graded 0.0"] and other[2]["tool/grade/final_reward"] == 0.0
    image = {"type": "image", "image": b"png"}
    assert look == [image, {"type": "text", "text": "A cat."}]
    assert [schema["function"]["name"] for schema in schemas] == ["grade", "look"]
    answer = schemas[0]["function"]["parameters"]["properties"]["answer"]
    assert answer == {"type": "string", "description": "The answer.", "enum": ["4", "5"]}

    import verl_classes

    assert len(verl_classes.released) == 2  # an instance for each episode that called it


def test_marked_functions(folder):
    toolbox = asyncio.run(open_toolbox(str(folder / "verl_functions.py"), 5.0))()
    functions = [schema["function"] for schema in toolbox.schemas]
    assert [f["name"] for f in functions] == ["double", "search", "free"]  # not the helper
    assert functions[1]["description"] == "Searches."
    assert asyncio.run(toolbox.call("double", {"x": 4})) == "8"
    assert asyncio.run(toolbox.call("search", {"query": "me"})) == "found me"
    assert asyncio.run(toolbox.call("free", {"b": 1, "a": 2})) == '["a", "b"]'


def test_what_is_refused(folder):
    with pytest.raises(UserError, match="has no attribute 'tool_schema'") as error:
        asyncio.run(open_toolbox(str(folder / "verl_classes.py"), 5.0))
    assert "YAML" in error.value.remedy  # GradeTool has no schema of its own
    (folder / "wrong.yaml").write_text("tools: [{class_name: verl_classes.Nobody}]")
    with pytest.raises(UserError, match="no attribute 'Nobody'"):
        asyncio.run(open_toolbox(str(folder / "wrong.yaml"), 5.0))
    (folder / "empty.yaml").write_text("a: 1")
    with pytest.raises(UserError, match="KeyError: 'tools'"):
        asyncio.run(open_toolbox(str(folder / "empty.yaml"), 5.0))


ALARM = """
import signal
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

class AlarmTool(BaseTool):
    def get_openai_tool_schema(self):
        parameters = {"type": "object", "properties": {}, "required": []}
        function = {"name": "alarm", "description": "Waits.", "parameters": parameters}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def execute(self, instance_id, parameters, **kwargs):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return ToolResponse(text="set"), 0.0, {}
"""


def test_a_class_that_sets_signals_is_refused_with_what_to_use(tmp_path):
    """The engine's event loop is in a thread; otherwise each call would fail, told to the policy."""
    path = tmp_path / "alarm.py"
    path.write_text(ALARM)

    async def call():
        toolbox = (await open_toolbox(str(path), 5.0))()
        await toolbox.call("alarm", {})

    with ThreadPoolExecutor(1) as threads, pytest.raises(UserError, match="sets signals") as error:
        threads.submit(asyncio.run, call()).result(timeout=60)
    assert "asyncio.timeout" in error.value.remedy
