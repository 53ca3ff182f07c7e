"""Calls of tools in the formats of families of models."""

import asyncio
import json

import pytest

from openrl.agents.conversation import EpisodeConfig
from openrl.agents.tools.agent import ToolAgent
from openrl.agents.tools.calls import ToolCall, call_id, message_forms
from openrl.agents.tools.functions import FunctionTools
from openrl.agents.tools.parsers import detect, parser_for
from openrl.agents.tools.toolbox import Toolbox
from openrl.data.template_forms import ReplyForm
from openrl.errors import UserError
from openrl.types import Prompt, Sampling
from tests.chat_templates import (
    CALL_TEMPLATES,
    FAMILIES,
    KIMI,
    TOOLS,
    TRL,
    chat_of,
    chat_with,
    tool,
)
from tests.scripted_policy import ScriptedPolicy

CHAT = chat_of("qwen2.5")

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
MISTRAL_ID = '[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"a": 2, "b": 2}'
COMMAND_ADD = (
    "<|START_THINKING|>I add.<|END_THINKING|><|START_ACTION|>[\n    "
    '{"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 2, "b": 2}}\n]<|END_ACTION|>'
)
KIMI_BOTH = (
    "<think>Two.</think>So:<|tool_calls_section_begin|><|tool_call_begin|>functions.add:3"
    '<|tool_call_argument_begin|>{"a": 2, "b": 2}<|tool_call_end|><|tool_call_begin|>functions.find:4'
    '<|tool_call_argument_begin|>{"text": "7", "most": 3, "tags": ["x"]}<|tool_call_end|>'
    "<|tool_calls_section_end|>"
)
HARMONY_ADD = (
    "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.add <|constrain|>json<|message|>{"a": 2, "b": 2}'
)
M2_FIND = (
    'Let me see.\n<minimax:tool_call>\n<invoke name="find">\n<parameter name="text">7</parameter>\n'
    '<parameter name="most">3</parameter>\n<parameter name="tags">["x"]</parameter>\n</invoke>\n'
    "</minimax:tool_call>"
)
DSML_FIND = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="find">\n<｜DSML｜parameter name="text" string="true">7'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="most" string="false">3</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="tags" string="false">["x"]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
)
SEED_FIND = (
    "<seed:think>I say <seed:tool_call>.</seed:think>\n<seed:tool_call>\n<function=find>\n"
    "<parameter=text>7</parameter>\n<parameter=most>3</parameter>\n"
    "<parameter=tags>['x', None]</parameter>\n</function>\n</seed:tool_call>"
)
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
         "", [ADD, ToolCall("now", {}, "123456789")]),
        ("mistral", " It is [4].", " It is [4].", []),
        ("mistral", f"[THINK]I say [TOOL_CALLS]now{{}}[/THINK]{MISTRAL_ID}",
         "[THINK]I say [TOOL_CALLS]now{}[/THINK]", [ToolCall("add", {"a": 2, "b": 2}, "a1B2c3D4e")]),
        ("mistral", "[THINK]I say [TOOL_CALLS]now{}", "[THINK]I say [TOOL_CALLS]now{}", []),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "a1B2c3D4e"}]', "",
         [ToolCall("now", {}, "a1B2c3D4e")]),
        ("hermes", f"<tool_call>[{ADD_JSON}, {FIND_JSON}]</tool_call>", "", [ADD, FIND]),
        ("apriel", f"Let me see.\n<tool_calls>[{ADD_JSON}, {FIND_JSON}]</tool_calls>", "Let me see.",
         [ADD, FIND]),
        ("granite", f"<|tool_call|> [{ADD_JSON}]", "", [ADD]),
        ("granite", f"<|tool_call|>[{ADD_JSON}]<|/tool_call|>", "", [ADD]),
        ("command", COMMAND_ADD, "<|START_THINKING|>I add.<|END_THINKING|>", [ADD]),
        ("command", "<|START_RESPONSE|>It is 4.<|END_RESPONSE|>",
         "<|START_RESPONSE|>It is 4.<|END_RESPONSE|>", []),
        ("kimi", KIMI_BOTH, "<think>Two.</think>So:", [
            ToolCall("add", {"a": 2, "b": 2}, "functions.add:3"),
            ToolCall("find", {"text": "7", "most": 3, "tags": ["x"]}, "functions.find:4")]),
        ("gpt_oss", HARMONY_ADD, "<|channel|>analysis<|message|>Two.<|end|>", [ADD]),
        ("gpt_oss", ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 2}', "", [ADD]),
        ("gpt_oss", "<|channel|>final<|message|>to=functions.add is a tool.",
         "<|channel|>final<|message|>to=functions.add is a tool.", []),
        ("minimax", M2_FIND, "Let me see.", [FIND]),
        ("deepseek_dsml", f"{DSML_FIND}<｜DSML｜invoke name=\"stop\"></｜DSML｜invoke></｜DSML｜tool_calls>",
         "", [FIND, ToolCall("stop", {})]),
        ("seed_oss", SEED_FIND, "<seed:think>I say <seed:tool_call>.</seed:think>",
         [ToolCall("find", {"text": "7", "most": 3, "tags": ["x", None]})]),
        ("gemma4", '<|tool_call>call:find{most:3,tags:[<|"|>x<|"|>],text:<|"|>7<|"|>}<tool_call|>',
         "", [FIND]),
        ("gemma4", '<|channel>thought\ncall:f{}<channel|><|tool_call>call:stop{}<tool_call|>'
         '<|tool_call>call:note{rest:{a:[1,{b c:<|"|>, d:"<|"|>}],e:null}}<tool_call|>',
         "<|channel>thought\ncall:f{}<channel|>",
         [ToolCall("stop", {}), ToolCall("note", {"rest": {"a": [1, {"b c": ', d:"'}], "e": None}})]),
        ("pythonic", "So:<|tool_call_start|>[add(a=2, b=2), find(text='7', most=3, tags=[\"x\"])]"
         "<|tool_call_end|>", "So:", [ADD, FIND]),
        ("pythonic", "[note(rest=true, day=None)]", "", [ToolCall("note", {"rest": True, "day": None})]),
        ("pythonic", "[1] says so (2).", "[1] says so (2).", []),
        ("llama_custom", 'So:<function=add>{"a": 2, "b": 2}</function>', "So:", [ADD]),
        ("llama_custom", '<mm:think>I <function=f>.</mm:think><function=stop>{}', "<mm:think>I <function=f>.</mm:think>",
         [ToolCall("stop", {})]),
        ("functionary", 'add\n{"a": 2, "b": 2}', "", [ADD]),
        ("functionary", 'all\nSo:>>>add\n{"a": 2, "b": 2}>>>stop\n{}', "all\nSo:", [ADD, ToolCall("stop", {})]),
        ("functionary", "all\n2 >>> 1\nis 0.", "all\n2 >>> 1\nis 0.", []),
        ("llama", ADD_LLAMA, "", [ADD]),
        ("llama", f"<|python_tag|>{ADD_LLAMA}; {ADD_LLAMA}", "", [ADD, ADD]),
        ("llama", '{"answer": 4}', '{"answer": 4}', []),
        ("json", f"Let me see.\n```json\n[{ADD_JSON}, {FIND_JSON}]\n```", "Let me see.", [ADD, FIND]),
        ("json", f"{ADD_JSON}\n{FIND_JSON}", "", [ADD, FIND]),
        ("json", "It is 4.", "It is 4.", []),
    ],
)  # fmt: skip
def test_what_a_reply_calls(parser, text, content, calls):
    parsed = parser_for(parser, CHAT)(text, SCHEMAS)
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
        ("kimi", "<|tool_calls_section_begin|>", "without a call"),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>add{}", "functions.NAME:NUMBER"),
        ("gpt_oss", " to=functions.add<|message|>2", "arguments of add"),
        ("minimax", '<minimax:tool_call><invoke name="add"><parameter name="a">2</invoke>', "an argument"),
        ("minimax", "<minimax:tool_call>add(2)</minimax:tool_call>", "a call is <invoke name="),
        ("deepseek_dsml", '<｜DSML｜invoke name="add">', "calls begin with"),
        ("gemma4", "<|tool_call>add{a:2}<tool_call|>", "a call is call:NAME"),
        ("gemma4", "<|tool_call>call:add{a:two}<tool_call|>", "not JSON"),
        ("llama_custom", "<function=add>2, 2</function>", "behind the JSON stands ', 2'"),
        ("functionary", "add\na = 2", "not JSON"),
        ("functionary", "all\nSo:>>>add\n[2, 2]", "arguments of add"),
        ("pythonic", "[add(2, b=2)]", "a call is name(key=value)"),
        ("pythonic", "[add(a=b)]", "not a Python literal"),
        ("pythonic", "<|tool_call_start|>add(", "not a list of calls"),
        ("llama", "<|python_tag|>add.call(a=2)", "not JSON"),
        ("llama", '{"name": "add", "parameters": {"a": 2', "not JSON"),
        ("json", f"{ADD_JSON} and then", "not JSON"),
    ],
)  # fmt: skip
def test_what_cannot_be_read(parser, text, says):
    parsed = parser_for(parser, CHAT)(text, SCHEMAS)
    assert says in parsed.error and parsed.calls == () and parsed.content == text
    assert len(parsed.error) < 300


@pytest.mark.parametrize("arguments", ["", ', "arguments": null', ', "arguments": ""'])
def test_a_call_without_arguments(arguments):
    text = f'<tool_call>{{"name": "stop"{arguments}}}</tool_call>'
    assert list(parser_for("hermes", CHAT)(text, SCHEMAS).calls) == [ToolCall("stop", {})]


def test_a_reply_that_repeats_itself_is_read_at_once():
    """An expression that tries all ends of all repetitions would take minutes."""
    glm_never_closed = "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * 20_000
    mistral_never_opened = "[TOOL_CALLS]f" + " " * 100_000 + "2"
    minimax_never_closed = '<minimax:tool_call><invoke name="f">' + '<parameter name="a">' * 20_000
    assert "an argument is" in parser_for("minimax", CHAT)(minimax_never_closed, SCHEMAS).error
    gemma_never_closed = "<|tool_call>call:f{" + "a:{" * 20_000
    assert "not JSON" in parser_for("gemma4", CHAT)(gemma_never_closed, SCHEMAS).error
    python_never_closed = "<|tool_call_start|>" + "[" * 100_000
    assert "not a list" in parser_for("pythonic", CHAT)(python_never_closed, SCHEMAS).error
    assert "an argument is" in parser_for("glm", CHAT)(glm_never_closed, SCHEMAS).error
    assert "not JSON" in parser_for("mistral", CHAT)(mistral_never_opened, SCHEMAS).error


FORMATS = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_think": "qwen3_coder",
    "llama3_1": "llama",
    "llama3_2": "llama",
    "glm4moe": "glm",
    "deepseekv3": "deepseek",
    "deepseek_r1_distill": "deepseek",
    "nemotron_3_nano": "qwen3_coder",
    "qwen3_8": "qwen3_coder",
    "gptoss": "gpt_oss",
    "gemma4": "gemma4",
    "lfm2_2_5_v2": "pythonic",
}


@pytest.mark.parametrize("template, parser", FORMATS.items())
def test_the_format_of_a_template(template, parser):
    assert detect(chat_with((TRL / f"{template}.jinja").read_text())) == parser


@pytest.mark.parametrize("parser", CALL_TEMPLATES)
def test_the_format_that_reads_back_what_a_template_writes(parser):
    chat = chat_with(CALL_TEMPLATES[parser])
    assert detect(chat) == parser


def test_a_mark_in_a_template_proves_nothing():
    """<tool_call> stands in the instructions; the calls are written in another way."""
    other = CALL_TEMPLATES["apriel"].replace("tool_calls>", "calls>")
    assert detect(chat_with(f"<tool_call>{{{{ tools | tojson if tools }}}}{other}")) is None
    assert detect(chat_with(f"<tool_call>{CALL_TEMPLATES['minimax']}")) == "minimax"


def test_a_template_that_only_describes_calls():
    shown = "{% if tools %}Write <|tool_call|> and a list.{{ tools | tojson }}{% endif %}"
    assert detect(chat_with(shown + FAMILIES["chatml"].template)) == "granite"
    assert detect(chat_with("<|tool_call|>" + FAMILIES["chatml"].template)) is None
    # as LFM 2 8B, whose template has no place for calls
    listed = "{% if tools %}List of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>{% endif %}"
    assert detect(chat_with(listed + FAMILIES["chatml"].template)) == "pythonic"


def test_the_format_of_one_template_of_several():
    plain, tool_use = FAMILIES["chatml"].template, FAMILIES["qwen2.5"].template
    assert detect(chat_with({"default": plain, "tool_use": tool_use})) == "hermes"


def test_mistral_is_known_by_what_it_writes():
    assert detect(chat_of("mistral")) == "mistral"


@pytest.mark.parametrize("template", ["llama3", "phi3_5", "gemma3"])
def test_a_template_without_tools(template):
    with pytest.raises(UserError, match="--tool_parser, one of apriel, command, deepseek, "):
        parser_for(None, chat_with((TRL / f"{template}.jinja").read_text()))


def test_a_name_that_nobody_has():
    with pytest.raises(UserError, match="did you mean 'hermes'"):
        parser_for("hermis", CHAT)


# not Mistral's, which adds ids, and not DeepSeek's, which forgets the reasoning that it has opened
@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama3", "glm4"])
def test_a_template_writes_calls_as_they_are_read(family):
    chat, words = chat_of(family), FAMILIES[family]
    parsed = parser_for(None, chat)(words.calls, TOOLS)
    assert parsed.calls == (ADD,)
    sampled = {"role": "assistant", "content": words.calls}
    forms = message_forms(sampled, parsed.numbered(1), ReplyForm())
    user = {"role": "user", "content": "What is 2 + 2?"}
    asked, whole = chat.render([user], TOOLS), chat.render([user, forms[0]], TOOLS)
    assert whole.startswith(asked + words.calls)


def test_the_policys_own_ids_name_calls_and_results():
    """Kimi's, which its template shows in calls and in results: all is one row."""
    chat = chat_with(KIMI)
    call = KIMI_BOTH.partition("So:")[2].partition("<|tool_call_begin|>functions.find")[0]
    says = f"<think>Two.</think>{call}<|tool_calls_section_end|>"
    policy = ScriptedPolicy(chat, [f"{says}<|im_end|>", "<think>It is.</think>4<|im_end|>"])

    def add(a: int, b: int) -> int:
        """Adds.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    agent = ToolAgent(
        lambda: Toolbox([FunctionTools([add])], 5.0), EpisodeConfig(chat, parser_for(None, chat))
    )
    prompt = Prompt("train:0", [1], "?", messages=({"role": "user", "content": "2 + 2?"},))
    played = asyncio.run(agent.run(prompt, policy, Sampling(max_tokens=1000)))
    (row,) = played.segments
    assert row.token_ids == policy.asked[1] + policy.given[1]
    assert "## Return of functions.add:3\n4" in chat.tokenizer.decode(policy.asked[1])


def test_an_id_that_is_written_twice_is_there_once():
    parsed = parser_for("kimi", CHAT)(KIMI_BOTH.replace("functions.find:4", "functions.add:3"), [])
    assert [call.id for call in parsed.numbered(7).calls] == ["functions.add:3", "call00008"]


def test_ids_are_as_long_as_mistral_wants_them():
    assert [call_id(9), call_id(10)] == ["call00009", "call00010"]
