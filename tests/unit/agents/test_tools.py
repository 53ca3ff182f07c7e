"""Python functions as tools: schemas, arguments, results, limits of time and length."""

import asyncio
import json
import os
import re
import threading
from pathlib import Path

import pytest

from openrl.agents.base import ToolError
from openrl.agents.tools.build import open_toolbox
from openrl.agents.tools.functions import FunctionTools
from openrl.agents.tools.parsers import parser_for
from openrl.agents.tools.toolbox import Toolbox
from openrl.errors import UserError
from openrl.extension_points import tool_parsers
from tests.chat_templates import chat_of

TOOLS = '''
import asyncio
import math as _math
from pathlib import Path

calls = []

def area(width: float, height: float = 1.0, unit: str | None = None) -> str:
    """Area of a rectangle.

    Args:
        width: Its width.
        height: Its height.
        unit: A unit, if there is one. (choices: ["m", "km"])
    """
    return f"{width * height} {unit}"

async def sizes(names: list[str]) -> dict:
    """How long names are.

    Args:
        names: The names.
    """
    await asyncio.sleep(0)
    return {name: len(name) for name in names}

def root(x: float):
    """A square root.

    Args:
        x: The number.
    """
    return _math.sqrt(x)

def long(n: int) -> str:
    """Many letters.

    Args:
        n: How many.
    """
    return "x" * n

def _helper(x):
    return x
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tools.py"
    path.write_text(TOOLS)
    return path


def opened(tools):
    return asyncio.run(open_toolbox(tools, 0.0))()


def call(toolbox, name, **arguments):
    return asyncio.run(toolbox.call(name, arguments))


def test_the_public_functions_of_a_file(file):
    toolbox = opened(str(file))
    assert [s["function"]["name"] for s in toolbox.schemas] == ["area", "sizes", "root", "long"]
    assert toolbox.schemas[0]["function"] == {
        "name": "area",
        "description": "Area of a rectangle.",
        "parameters": {
            "type": "object",
            "properties": {
                "width": {"type": "number", "description": "Its width."},
                "height": {"type": "number", "description": "Its height."},
                "unit": {
                    "type": "string",
                    "nullable": True,
                    "enum": ["m", "km"],
                    "description": "A unit, if there is one.",
                },
            },
            "required": ["width"],
        },
        "return": {"type": "string"},
    }


def test_results_are_text(file):
    toolbox = opened(str(file))
    assert call(toolbox, "area", width=2, height=2.5, unit="m") == "5.0 m"
    assert call(toolbox, "area", width=2, unit=None) == "2.0 None"
    assert call(toolbox, "sizes", names=["é", "ab"]) == '{"é": 1, "ab": 2}'
    assert call(toolbox, "root", x=9) == "3.0"


@pytest.mark.parametrize(
    "name, arguments, says",
    [
        ("area", {}, "area: 'width' is a required property"),
        ("area", {"width": "2"}, "area: '2' is not of type 'number'"),
        ("area", {"width": 2, "depth": 3}, "'depth' was unexpected"),
        ("area", {"width": 2, "unit": "mile"}, "not valid under any of the given schemas"),
        ("sizes", {"names": ["a", 1]}, "sizes: 1 is not of type 'string'"),
        ("aera", {}, "there is no tool 'aera', only area, sizes, root, long"),
        ("root", {"x": -1}, "ValueError: "),
    ],
)
def test_calls_that_are_wrong(file, name, arguments, says):
    with pytest.raises(ToolError, match=says):
        call(opened(str(file)), name, **arguments)


def test_a_long_result_is_cut_and_says_so(file):
    toolbox = opened(str(file))
    assert call(toolbox, "long", n=8000) == "x" * 8000 and toolbox.cut == 0
    assert call(toolbox, "long", n=9000) == "x" * 8000 + "\n[cut: the result has 9000 characters]"
    assert toolbox.cut == 1


ALARM = '''
import asyncio
import os
HEAD

class Word(str):
    pass

def wait(seconds: float) -> str:
    """Waits, but not for long.

    Args:
        seconds: How long.
    """
    def stop(number, frame):
        raise TimeoutError("too slow")

    BODY
    pause.sleep(seconds)
    return Word("waited")

def pid() -> int:
    """The process."""
    return os.getpid()
'''


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("import signal, time as pause", "signal.signal(signal.SIGALRM, stop); signal.alarm(1)"),
        ("import alarms, time as pause", "alarms.set(stop)"),
        ("import signal, time as pause", "signal.signal(signal.SIGALRM, stop); await asyncio.sleep(0); signal.alarm(1)"),
    ],
    ids=["itself", "by a library", "in a coroutine"],
)  # fmt: skip
def test_a_function_may_set_signals(tmp_path, head, body):
    """Only the main thread of a process may."""
    path = tmp_path / "waits.py"
    text = ALARM.replace("HEAD", head).replace("BODY", body)
    path.write_text(text.replace("def wait", "async def wait") if "await" in body else text)
    (tmp_path / "alarms.py").write_text(
        "import signal\ndef set(stop):\n    signal.signal(signal.SIGALRM, stop); signal.alarm(1)\n"
    )
    toolbox = opened(str(path))
    said = call(toolbox, "wait", seconds=0)
    assert said == "waited" and type(said) is str
    with pytest.raises(ToolError, match="TimeoutError: too slow"):
        call(toolbox, "wait", seconds=100)
    apart = head.startswith("import signal")
    assert (call(toolbox, "pid") == str(os.getpid())) != apart


def test_one_function_of_a_file(file):
    assert [s["function"]["name"] for s in opened(f"{file}:root").schemas] == ["root"]
    both = opened(f"{file}:root, {file}:area").schemas
    assert [s["function"]["name"] for s in both] == ["root", "area"]
    with pytest.raises(UserError, match="has no tool named roof") as refused:
        opened(f"{file}:roof")
    assert refused.value.remedy == "one of area, sizes, root, long"


def test_a_call_that_hangs_holds_up_nobody():
    hold = threading.Event()

    def hangs() -> str:
        """Waits."""
        hold.wait(60)
        return "late"

    async def waits() -> str:
        """Waits."""
        await asyncio.sleep(60)
        return "late"

    def quick() -> str:
        """Does not."""
        return "done"

    toolbox = Toolbox([FunctionTools([hangs, waits, quick])], timeout=0.2)

    async def all_at_once():
        names = ["hangs"] * 40 + ["waits", "quick"]
        return await asyncio.gather(
            *(toolbox.call(name, {}) for name in names), return_exceptions=True
        )

    *late, done = asyncio.run(all_at_once())
    hold.set()
    assert {str(error) for error in late} == {
        "hangs gave no answer within 0.2 s",
        "waits gave no answer within 0.2 s",
    }
    assert done == "done"


def test_what_a_tool_says_of_its_own_timeout_is_its_error():
    def asks() -> str:
        """Asks."""
        raise TimeoutError("the server is slow")

    with pytest.raises(ToolError, match="TimeoutError: the server is slow"):
        call(Toolbox([FunctionTools([asks])], timeout=5.0), "asks")


@pytest.mark.parametrize(
    "line, says",
    [
        ("def f(x):\n    'Does.'", "f cannot be a tool: the parameter x has no type"),
        ("def f(x: int):\n    'Does.'", "no description for the argument 'x'"),
        ("def f(x: int): pass", "it has no docstring"),
        ("class A: pass\ndef f(x: A):\n    'Does.'", "the type of x: .*A has no form in JSON"),
        ("import torch\ndef f(x: torch.Tensor):\n    '''Does.\n\n    Args:\n        x: It.\n    '''",
         "the type of x: torch.Tensor has no form"),
        ("def f(*x: int):\n    'Does.'", r"\*x: int stands for any number"),
        ("def f(x: int, /):\n    'Does.'", "the parameter x has no name for its callers"),
        ("def f():\n    'Does.'\n    yield 1", "it yields values, but a tool returns one"),
        ("async def f():\n    'Does.'\n    yield 1", "it yields values, but a tool returns one"),
        ("x = 1", "defines no public function"),
        ("1 / 0", "fails: ZeroDivisionError"),
        ("raise SystemExit(3)", "fails: SystemExit: 3"),
    ],
)  # fmt: skip
def test_what_makes_no_tool(tmp_path, line, says):
    path = tmp_path / "wrong.py"
    path.write_text(line)
    with pytest.raises(UserError, match=says) as error:
        opened(str(path))
    assert error.value.remedy or "fails" in says


def test_what_is_no_source_of_tools(file, tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        opened(str(tmp_path / "none.py"))
    with pytest.raises(UserError, match="'calculator' is not a source of tools"):
        opened("calculator")
    with pytest.raises(UserError, match="'~nouser' is not a source of tools"):
        opened("~nouser")
    with pytest.raises(UserError, match=r"there is no file ~nouser/tools\.py"):
        opened("~nouser/tools.py")
    with pytest.raises(UserError, match="two tools are called area"):
        opened(f"{file}, {file}")


def test_programs_in_the_sandbox():
    toolbox = opened("python")
    assert call(toolbox, "python", code="print(2 + 2)\nprint('é')") == "4\né"
    assert call(toolbox, "python", code="x = 1") == "(nothing was printed)"
    for code, says in [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import socket; socket.socket()", "PermissionError"),
        ("x = ' ' * 10**10", "too much memory"),
    ]:
        with pytest.raises(ToolError, match=says):
            call(toolbox, "python", code=code)
    (schema,) = toolbox.schemas
    assert json.dumps(schema) and schema["function"]["parameters"]["required"] == ["code"]


PAGE = (Path(__file__).parents[3] / "docs" / "tools.md").read_text()


def test_the_functions_of_the_page_as_printed(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "page_tools.py").write_text(code)
    toolbox = opened(f"{tmp_path / 'page_tools.py'},python")
    assert [s["function"]["name"] for s in toolbox.schemas] == ["convert", "letters", "python"]
    assert call(toolbox, "convert", amount=3, rate=0.5) == "1.5"
    assert call(toolbox, "letters", words=["ab"]) == '{"ab": 2}'


def test_the_calls_of_the_page_are_read_as_it_says():
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| (.*) \|$", PAGE, re.MULTILINE)
    own = [entry.name for entry in tool_parsers.entries() if not entry.component.library]
    assert sorted(name for name, _ in rows) == own
    for name, written in rows:
        for text in re.findall(r"`([^`]+)`", written.replace("\\|", "|").replace("⏎", "\n")):
            parsed = parser_for(name, chat_of("qwen2.5"))(text, [])
            calls = [(call.name, call.arguments) for call in parsed.calls]
            assert calls == [("add", {"a": 2})], (name, text, parsed)
