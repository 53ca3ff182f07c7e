"""Calls of tools are read as vLLM's own parsers read them."""

from __future__ import annotations

import json

import pytest

from openrl.agents.tools.parsers import parser_for
from tests.chat_templates import chat_of, family_tokenizer, tool

pytest.importorskip("vllm")

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


# ours, vLLM's, how a call is written, how several are put together
FORMATS = [
    ("hermes", "hermes", hermes, "\n".join),
    ("glm", "glm45", glm, "\n".join),
    ("qwen3_coder", "qwen3_coder", qwen3_coder, "\n".join),
    ("deepseek", "deepseek_v3", deepseek, in_frame),
    ("deepseek", "deepseek_v31", deepseek_31, in_frame),
    ("mistral", "mistral", as_json, lambda calls: f"[TOOL_CALLS] [{', '.join(calls)}]"),
    ("llama", "llama3_json", llama, "; ".join),
]


@pytest.fixture(scope="module")
def vllm_parse():
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    tokenizer = family_tokenizer("qwen2.5")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>", "[TOOL_CALLS]"]})
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
        assert ours == calls == vllm_parse(other, text), text


@pytest.mark.parametrize(("name", "other"), [entry[:2] for entry in FORMATS])
def test_an_answer_calls_nothing_here_nor_there(name, other, vllm_parse):
    answer = "It is 4. Call me {name}, or <tool> it."
    read = parser_for(name, CHAT)(answer, TOOLS)
    assert read.error is None and not read.calls and not vllm_parse(other, answer)
