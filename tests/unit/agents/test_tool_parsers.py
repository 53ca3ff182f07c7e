"""Calls of tools in the formats of families of models."""

import json

import pytest

from openrl.agents.tools.calls import ToolCall, call_id, message_forms
from openrl.agents.tools.parsers import detect, parser_for
from openrl.errors import UserError
from tests.chat_templates import FAMILIES, TOOLS, TRL, chat_of, tool

ADD = ToolCall("add", {"a": 2, "b": 2})
FIND = ToolCall("find", {"text": "7", "most": 3, "tags": ["x"]})
SCHEMAS = [
    *TOOLS,
    tool("find", text={"type": "string"}, most={"type": "integer"}, tags={"type": "array"}),
    tool("note", text={"anyOf": [{"type": "string"}, {"type": "null"}]}, day={"type": ["null", "string"]},
         most={"anyOf": [{"type": "string"}, {"type": "integer"}]}, rest=True),
    {"type": "function", "function": {"name": "stop"}},
]  # fmt: skip


def hermes(*calls):
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': c.name, 'arguments': c.arguments})}\n</tool_call>"
        for c in calls
    )


def glm(name, **arguments):
    pairs = (f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments.items())
    return f"<tool_call>{name}{''.join(pairs)}</tool_call>"


GLM_FIND = (
    "<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>7</arg_value>\n<arg_key>most</arg_key>\n"
    '<arg_value>3</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>["x"]</arg_value>\n</tool_call>'
)
GLM_47 = "<tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value><arg_key>b</arg_key><arg_value>2</arg_value></tool_call>"
CODER = (
    "<tool_call>\n<function=find>\n<parameter=text>\n7\n</parameter>\n<parameter=most>\n3\n"
    '</parameter>\n<parameter=tags>\n["x"]\n</parameter>\n</function>\n</tool_call>'
)
V3 = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 2, "b": 2}\n```<｜tool▁call▁end｜>'
V31_ADD = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 2, "b": 2}<｜tool▁call▁end｜>'
V31_FIND = '<｜tool▁call▁begin｜>find<｜tool▁sep｜>{"text": "7", "most": 3, "tags": ["x"]}<｜tool▁call▁end｜>'
ADD_JSON = '{"name": "add", "arguments": {"a": 2, "b": 2}}'
FIND_JSON = '{"name": "find", "arguments": {"text": "7", "most": 3, "tags": ["x"]}}'
ADD_LLAMA = '{"name": "add", "parameters": {"a": 2, "b": 2}}'


@pytest.mark.parametrize(
    "parser, text, content, calls",
    [
        ("hermes", hermes(ADD), "", [ADD]),
        ("hermes", f"Let me see.\n{hermes(ADD, FIND)}", "Let me see.", [ADD, FIND]),
        ("hermes", hermes(ADD).removesuffix("</tool_call>"), "", [ADD]),
        ("hermes", "It is 4.\n", "It is 4.\n", []),
        ("hermes", f"<think>\nI say {hermes(FIND)}\n</think>\n\nIt is 4.",
         f"<think>\nI say {hermes(FIND)}\n</think>\n\nIt is 4.", []),
        ("hermes", f"<think>\nI say {hermes(FIND)}", f"<think>\nI say {hermes(FIND)}", []),
        ("hermes", f"<think>\nTwo.\n</think>\n\n{hermes(ADD)}", "<think>\nTwo.\n</think>", [ADD]),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [ToolCall("now", {})]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
         [ToolCall("add", {"a": 1})]),
        ("glm", f"\n<think>Two.</think>\n{GLM_FIND}", "\n<think>Two.</think>", [FIND]),
        ("glm", GLM_47 + GLM_FIND, "", [ADD, FIND]),
        ("glm", "<tool_call>now\n</tool_call>", "", [ToolCall("now", {})]),
        ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>two</arg_value>\n</tool_call>", "",
         [ToolCall("add", {"a": "two"})]),
        # a text that may be missing is a text, even where it looks like a number
        ("glm", glm("note", text="7", day="null", most="7", rest="7"), "",
         [ToolCall("note", {"text": "7", "day": None, "most": 7, "rest": 7})]),
        ("glm", glm("note", text='"7"', day=" null "), "",
         [ToolCall("note", {"text": '"7"', "day": None})]),
        ("glm", glm("stop", at="7"), "", [ToolCall("stop", {"at": 7})]),
        ("qwen3_coder", f"So:\n\n{CODER}", "So:", [FIND]),
        ("qwen3_coder", f"{CODER}\n{CODER}", "", [FIND, FIND]),
        ("qwen3_coder", "<tool_call>\n<function=find>\n<parameter=text>\na\n\nb\n</parameter>\n"
         "</function>\n</tool_call>", "", [ToolCall("find", {"text": "a\n\nb"})]),
        ("deepseek", f"Two.\n</think>\n\n{V3}<｜tool▁calls▁end｜>", "Two.\n</think>", [ADD]),
        ("deepseek", f"<｜tool▁calls▁begin｜>{V31_ADD}{V31_FIND}<｜tool▁calls▁end｜>", "", [ADD, FIND]),
        ("mistral", f"[TOOL_CALLS] [{ADD_JSON}, {FIND_JSON}]", "", [ADD, FIND]),
        ("mistral", 'So[TOOL_CALLS]add{"a": 2, "b": 2}', "So", [ADD]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 2, "b": 2}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}',
         "", [ADD, ToolCall("now", {})]),
        ("mistral", " It is [4].", " It is [4].", []),
        ("llama", ADD_LLAMA, "", [ADD]),
        ("llama", f"<|python_tag|>{ADD_LLAMA}; {ADD_LLAMA}", "", [ADD, ADD]),
        ("llama", '{"answer": 4}', '{"answer": 4}', []),
        ("json", f"Let me see.\n```json\n[{ADD_JSON}, {FIND_JSON}]\n```", "Let me see.", [ADD, FIND]),
        ("json", f"{ADD_JSON}\n{FIND_JSON}", "", [ADD, FIND]),
        ("json", "It is 4.", "It is 4.", []),
    ],
)  # fmt: skip
def test_what_a_reply_calls(parser, text, content, calls):
    parsed = parser_for(parser, None)(text, SCHEMAS)
    assert (parsed.content, list(parsed.calls), parsed.error) == (content, calls, None)


@pytest.mark.parametrize(
    "parser, text, says",
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 2</tool_call>', "not JSON"),
        ("hermes", f'{hermes(ADD)}\n<tool_call>{{"nam": 1}}</tool_call>', "a call is"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [2, 2]}</tool_call>', "arguments of add"),
        ("hermes", f"<tool_call>{ADD_JSON} please</tool_call>", "behind the JSON stands 'please'"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "(NaN is no finite"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": -1e999}}</tool_call>', "(-1e999 is no"),
        ("hermes", "<tool_call>", "not JSON"),
        ("hermes", "<tool_call>" + "[" * 100_000, "not JSON"),
        ("glm", "<tool_call>\n<arg_key>a</arg_key><arg_value>2</arg_value></tool_call>", "no name"),
        ("glm", "<tool_call>add\n<arg_key>a</arg_key><arg_value>2</tool_call>", "an argument is"),
        ("qwen3_coder", f"<tool_call>{ADD_JSON}</tool_call>", "<function=name>"),
        ("deepseek", "<｜tool▁calls▁begin｜>add", "without a call"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add{}<｜tool▁call▁end｜>", "tool▁sep"),
        ("mistral", "[TOOL_CALLS] add(2, 2)", "not JSON"),
        ("mistral", "[TOOL_CALLS]", "not JSON"),
        ("llama", "<|python_tag|>add.call(a=2)", "not JSON"),
        ("llama", '{"name": "add", "parameters": {"a": 2', "not JSON"),
        ("json", f"{ADD_JSON} and then", "not JSON"),
    ],
)  # fmt: skip
def test_what_cannot_be_read(parser, text, says):
    parsed = parser_for(parser, None)(text, SCHEMAS)
    assert says in parsed.error and parsed.calls == () and parsed.content == text
    assert len(parsed.error) < 300


def test_a_reply_that_repeats_itself_is_read_at_once():
    """An expression that tries all ends of all repetitions would take minutes."""
    glm_never_closed = "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * 20_000
    mistral_never_opened = "[TOOL_CALLS]f" + " " * 100_000 + "2"
    assert "an argument is" in parser_for("glm", None)(glm_never_closed, SCHEMAS).error
    assert "not JSON" in parser_for("mistral", None)(mistral_never_opened, SCHEMAS).error


FORMATS = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_think": "qwen3_coder",
    "llama3_1": "llama",
    "llama3_2": "llama",
    "glm4moe": "glm",
    "deepseekv3": "deepseek",
    "deepseek_r1_distill": "deepseek",
}


@pytest.mark.parametrize("template, parser", FORMATS.items())
def test_the_format_of_a_template(template, parser):
    assert detect((TRL / f"{template}.jinja").read_text()) == parser


def test_the_format_of_one_template_of_several():
    plain, tool_use = FAMILIES["chatml"].template, FAMILIES["qwen2.5"].template
    assert detect({"default": plain, "tool_use": tool_use}) == "hermes"


def test_mistral_is_known_by_its_mark():
    assert detect(FAMILIES["mistral"].template) == "mistral"


@pytest.mark.parametrize("template", ["llama3", "phi3_5", "gemma3"])
def test_a_template_without_tools(template):
    with pytest.raises(UserError, match="--tool_parser, one of deepseek, glm, hermes, json"):
        parser_for(None, (TRL / f"{template}.jinja").read_text())


def test_a_name_that_nobody_has():
    with pytest.raises(UserError, match="did you mean 'hermes'"):
        parser_for("hermis", None)


# not Mistral's, which adds ids, and not DeepSeek's, which forgets the reasoning that it has opened
@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama3", "glm4"])
def test_a_template_writes_calls_as_they_are_read(family):
    chat, words = chat_of(family), FAMILIES[family]
    parsed = parser_for(None, words.template)(words.calls, TOOLS)
    assert parsed.calls == (ADD,)
    forms = message_forms({"role": "assistant", "content": words.calls}, parsed.numbered(1))
    user = {"role": "user", "content": "What is 2 + 2?"}
    asked, whole = chat.render([user], TOOLS), chat.render([user, forms[0]], TOOLS)
    assert whole.startswith(asked + words.calls)


def test_ids_are_as_long_as_mistral_wants_them():
    assert [call_id(9), call_id(10)] == ["call00009", "call00010"]
