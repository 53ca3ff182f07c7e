"""Calls of tools are read as vLLM's own parsers read them."""

from __future__ import annotations

import json

import pytest

from openrl.agents.tools.parsers import detect, parser_for
from openrl.rollout_engines.vllm_parsers import NAMES
from tests.chat_templates import chat_of, chat_with, family_tokenizer, tool

pytest.importorskip("vllm")

MARKS = [
    "<|python_tag|>", "[TOOL_CALLS]", "<seed:tool_call>", "</seed:tool_call>", "<seed:think>",
    "</seed:think>", "<seed:bos>", "<seed:eos>", "<minimax:tool_call>", "</minimax:tool_call>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_end|>", "<|tool_call_argument_begin|>", "<|tool_call>", "<tool_call|>",
    "<|channel>", "<channel|>", '<|"|>', "<|tool_call|>", "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
]  # fmt: skip
PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "list": {"type": "array", "items": {"type": "number"}},
    "deep": {"type": "object"},
}
CHAT = chat_of("qwen2.5")
TOOLS = [tool(name, **PROPERTIES) for name in ("find", "look_up")]
ARGUMENTS = [
    {"text": "plain"},
    {"text": 'naïve "quotes" \\ 猫 <b>', "count": -3},
    {"count": 10**12, "list": [1, 2.5, -0.25], "deep": {"a": {"b": [None, True]}}},
    {"text": "two\nlines", "deep": {}},
]


def as_json(name, arguments, key="arguments"):
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def hermes(name, arguments):
    return f"<tool_call>\n{as_json(name, arguments)}\n</tool_call>"


def glm(name, arguments):
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def qwen3_coder(name, arguments):
    pairs = "".join(
        f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def as_text(value):
    return value if isinstance(value, str) else json.dumps(value)


def deepseek(name, arguments):
    code = f"```json\n{json.dumps(arguments, ensure_ascii=False)}\n```"
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n{code}<｜tool▁call▁end｜>"


def deepseek_31(name, arguments):
    code = json.dumps(arguments, ensure_ascii=False)
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{code}<｜tool▁call▁end｜>"


def in_frame(calls):
    return f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>"


def llama(name, arguments):
    return as_json(name, arguments, "parameters")


def seed_oss(name, arguments):
    return qwen3_coder(name, arguments).replace("tool_call>", "seed:tool_call>")


def minimax(name, arguments):
    pairs = "".join(
        f'<parameter name="{key}">{as_text(value)}</parameter>\n'
        for key, value in arguments.items()
    )
    return f'<invoke name="{name}">\n{pairs}</invoke>'


def dsml(name, arguments):
    pairs = "".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{as_text(value)}</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{pairs}</｜DSML｜invoke>\n'


def kimi(name, arguments):
    code = json.dumps(arguments, ensure_ascii=False)
    return (
        f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{code}<|tool_call_end|>"
    )


def gemma4(name, arguments):
    return f"<|tool_call>call:{name}{in_gemma(arguments)}<tool_call|>"


def in_gemma(value):
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(in_gemma, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{in_gemma(one)}' for key, one in value.items())}}}"
    return json.dumps(value)


# ours, vLLM's, how a call is written, how several are put together
FORMATS = [
    ("hermes", "hermes", hermes, "\n".join),
    ("glm", "glm45", glm, "\n".join),
    ("qwen3_coder", "qwen3_coder", qwen3_coder, "\n".join),
    ("deepseek", "deepseek_v3", deepseek, in_frame),
    ("deepseek", "deepseek_v31", deepseek_31, in_frame),
    ("mistral", "mistral", as_json, lambda calls: f"[TOOL_CALLS] [{', '.join(calls)}]"),
    ("llama", "llama3_json", llama, "; ".join),
    ("seed_oss", "seed_oss", seed_oss, "\n".join),
    (
        "minimax",
        "minimax_m2",
        minimax,
        lambda calls: f"<minimax:tool_call>\n{chr(10).join(calls)}\n</minimax:tool_call>",
    ),
    (
        "deepseek_dsml",
        "deepseek_v32",
        dsml,
        lambda calls: f"<｜DSML｜function_calls>\n{''.join(calls)}</｜DSML｜function_calls>",
    ),
    (
        "kimi",
        "kimi_k2",
        kimi,
        lambda calls: f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>",
    ),
    ("gemma4", "gemma4", gemma4, "".join),
    ("granite", "granite", as_json, lambda calls: f"<|tool_call|>[{', '.join(calls)}]"),
]


@pytest.fixture(scope="module")
def vllm_parse():
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    tokenizer = family_tokenizer("qwen2.5")
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    question = [{"role": "user", "content": "?"}]

    def parse(name, text):
        request = ChatCompletionRequest(model="m", messages=question, tools=TOOLS)
        parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
        found = parser.extract_tool_calls(text, request).tool_calls
        return [(call.function.name, json.loads(call.function.arguments)) for call in found]

    return parse


@pytest.mark.parametrize(("name", "other", "write", "join"), FORMATS)
def test_calls_are_what_vllm_reads(name, other, write, join, vllm_parse):
    parse = parser_for(name, CHAT)
    asked = [("find", arguments) for arguments in ARGUMENTS] + [("look_up", {})]
    for calls in [*([call] for call in asked), asked[:2], asked]:
        text = join([write(*call) for call in calls])
        read = parse(text, TOOLS)
        assert read.error is None, text
        ours = [(call.name, dict(call.arguments)) for call in read.calls]
        theirs = vllm_parse(other, text)
        if other == "gemma4":  # it reads constants within lists as texts
            exact = json.dumps(theirs).replace('["null", "true"]', "[null, true]")
            theirs = [tuple(call) for call in json.loads(exact)]
        assert ours == calls == theirs, text


@pytest.mark.parametrize(("name", "other"), [entry[:2] for entry in FORMATS])
def test_an_answer_calls_nothing_here_nor_there(name, other, vllm_parse):
    answer = "It is 4. Call me {name}, or <tool> it."
    read = parser_for(name, CHAT)(answer, TOOLS)
    assert read.error is None and not read.calls and not vllm_parse(other, answer)


APERTUS = """
{%- for m in messages %}
{{- "<|im_start|>" ~ m.role ~ "\\n" ~ m.content }}
{%- if m.tool_calls %}
  {{- "<|tools_prefix|>[" }}
  {%- for c in m.tool_calls %}
    {{- '{"' ~ c.function.name ~ '": ' ~ c.function.arguments | tojson ~ "}" }}
    {{- "" if loop.last else ", " }}
  {%- endfor %}
  {{- "]<|tools_suffix|>" }}
{%- endif %}
{{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{% endif %}"""


def test_vllm_reads_what_no_format_here_reads():
    """Apertus's calls, of which the template writes one before the start."""
    chat = chat_with(APERTUS)
    assert detect(chat) == "vllm_apertus"
    parse = parser_for(None, chat)
    text = (
        '<|tools_prefix|>[{"find": {"text": "naïve", "count": 2}}, {"look_up": {}}]<|tools_suffix|>'
    )
    read = parse(f"<think>I say {text}</think>So:{text}", TOOLS)
    calls = [(call.name, dict(call.arguments)) for call in read.calls]
    assert calls == [("find", {"text": "naïve", "count": 2}), ("look_up", {})]
    assert read.content == f"<think>I say {text}</think>So:" and read.error is None
    answer = parse("It is 4.", TOOLS)
    assert (answer.content, answer.calls, answer.error) == ("It is 4.", (), None)


MINIMAX_M3 = """
{%- set n = "]<]minimax[>[" %}
{%- for m in messages %}
{{- "]~b]" ~ {"assistant": "ai"}.get(m.role, m.role) ~ "\\n" ~ m.content }}
{%- for c in m.tool_calls %}
  {{- "\\n" ~ n ~ "<tool_call>\\n" if loop.first }}
  {{- n ~ '<invoke name="' ~ c.function.name ~ '">\\n' }}
  {%- for key, value in c.function.arguments.items() %}
    {{- n ~ "<" ~ key ~ ">" ~ value ~ n ~ "</" ~ key ~ ">\\n" }}
  {%- endfor %}
  {{- n ~ "</invoke>\\n" }}{{ n ~ "</tool_call>" if loop.last }}
{%- endfor %}
{{- "[e~[\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "]~b]ai\\n" }}{% endif %}"""
IN_MINIMAX_M3 = """<mm:think>I look.</mm:think>Now:
]<]minimax[>[<tool_call>
]<]minimax[>[<invoke name="find">
]<]minimax[>[<text>naïve]<]minimax[>[</text>
]<]minimax[>[<list>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[</list>
]<]minimax[>[</invoke>
]<]minimax[>[</tool_call>"""
GIGACHAT = """
{%- for m in messages %}
{{- m.role ~ "<|role_sep|>\\n" ~ m.content ~ "<|message_sep|>\\n\\n" }}
{%- for c in m.tool_calls %}
  {{- 'function call<|role_sep|>\\n{"name": "' ~ c.function.name ~ '", "arguments": ' }}
  {{- c.function.arguments | tojson ~ "}<|message_sep|>\\n\\n" }}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "assistant<|role_sep|>\\n" }}{% endif %}"""
IN_GIGACHAT = """Now:<|message_sep|>

function call<|role_sep|>
{"name": "find", "arguments": {"text": "naïve", "list": [1]}}"""


@pytest.mark.parametrize(
    "template, parser, text, content",
    [
        (MINIMAX_M3, "vllm_minimax_m3", IN_MINIMAX_M3, "<mm:think>I look.</mm:think>Now:"),
        # a format that finds the JSON alone would leave the roles in the content
        (GIGACHAT, "vllm_gigachat3", IN_GIGACHAT, "Now:"),
    ],
)
def test_vllm_reads_what_formats_here_read_in_part_or_not(template, parser, text, content):
    chat = chat_with(template, "[e~[" if template is MINIMAX_M3 else "<|message_sep|>")
    assert detect(chat) == parser
    read = parser_for(None, chat)(text, TOOLS)
    assert [(c.name, c.arguments) for c in read.calls] == [("find", {"text": "naïve", "list": [1]})]
    assert (read.content, read.error) == (content, None)


@pytest.mark.parametrize("name", NAMES)
def test_vllm_has_the_parsers_that_are_named(name):
    from vllm.tool_parsers import ToolParserManager

    assert ToolParserManager.get_tool_parser(name)
