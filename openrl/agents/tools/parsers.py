"""Reads the calls in a reply, in the formats of several model families.

``parse(text, schemas)`` takes a whole reply without the token that ends it. Where a format writes
arguments without their types, the tools' schemas tell them. If a call does not follow the format,
the policy is told about the error; if one of several calls cannot be read, none is made.

A policy may write anything, for as many tokens as it has, and it is read in the event loop: no
expression here may take longer than the text is long."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from openrl.agents.chat import Schemas
from openrl.agents.tools.calls import Parse, ParsedReply, ToolCall
from openrl.errors import UserError, short
from openrl.extension_points import tool_parsers

ChatTemplate = str | Mapping[str, str]
"""A chat template. Some tokenizers have several by name, one of them for tools."""
Reader = Callable[[str, Schemas], tuple[str, list[ToolCall]]]
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class CallFormat:
    """A parser, and the marks of its chat templates. Without marks it must be chosen by name."""

    parse: Parse
    marks: tuple[str, ...] = ()


class Malformed(Exception):
    """A call cannot be read; the message says why."""


def parser_for(name: str | None, chat_template: ChatTemplate | None) -> Parse:
    """Return the parser of that name or, without a name, the one that fits the chat template.
    Raises UserError if there is none."""
    chosen = name or detect(chat_template or "")
    if chosen is None:
        raise UserError(
            "--tools: the chat template writes tool calls in an unknown format",
            f"--tool_parser, one of {', '.join(tool_parsers.names())}",
        )
    return tool_parsers[chosen].component.parse


def detect(chat_template: ChatTemplate) -> str | None:
    """Return the name of the format in which the template writes calls: the one with the most marks
    of which all are in the template; None if it is not a known one."""
    given = chat_template
    text = given if isinstance(given, str) else "\n".join(given.values())
    marks = {entry.name: entry.component.marks for entry in tool_parsers.entries()}
    fitting = [name for name, of in marks.items() if of and all(mark in text for mark in of)]
    return max(fitting, key=lambda name: len(marks[name]), default=None)


def call_format(name: str, *marks: str) -> Callable[[Reader], Reader]:
    """Register a function that reads the calls after the reasoning and raises Malformed."""

    def add(read: Reader) -> Reader:
        def parse(text: str, schemas: Schemas = ()) -> ParsedReply:
            thought, closed, rest = text.rpartition("</think>")
            if not closed and "<think>" in text:  # all of it is reasoning
                return ParsedReply(text)
            try:
                content, calls = read(rest, schemas)
            except Malformed as error:
                return ParsedReply(text, error=str(error))
            whole = thought + closed + content
            return ParsedReply(whole.rstrip() if calls else whole, tuple(calls))

        tool_parsers.register(name)(CallFormat(parse, marks))
        return read

    return add


@call_format("hermes", "<tool_call>")
def hermes(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """Hermes, Qwen 2.5, Qwen 3: ``<tool_call>{"name": .., "arguments": ..}</tool_call>``."""
    content, blocks = _between(text, "<tool_call>", "</tool_call>")
    return content, [_call(_value(block)) for block in blocks]


@call_format("glm", "<tool_call>", "<arg_key>")
def glm(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """GLM 4: a name, then ``<arg_key>`` and ``<arg_value>`` for each argument."""
    content, blocks = _between(text, "<tool_call>", "</tool_call>")
    pair = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
    calls = []
    for block in blocks:
        name, mark, rest = block.partition("<arg_key>")
        pairs = _read_pairs(pair, mark + rest, "<arg_key>..</arg_key><arg_value>..</arg_value>")
        calls.append(_typed_call(name.strip(), pairs, schemas))
    return content, calls


@call_format("qwen3_coder", "<tool_call>", "<function=")
def qwen3_coder(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """Qwen 3 Coder, Qwen 3.5: ``<function=..>`` with ``<parameter=..>`` for each argument."""
    content, blocks = _between(text, "<tool_call>", "</tool_call>")
    pair = re.compile(r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
    calls = []
    for block in blocks:
        function = re.fullmatch(r"\s*<function=([^>]+)>(.*)</function>\s*", block, re.DOTALL)
        if not function:
            raise Malformed("a call is <function=name>..</function>")
        pairs = _read_pairs(pair, function[2], "<parameter=name>..</parameter>")
        calls.append(_typed_call(function[1].strip(), pairs, schemas))
    return content, calls


@call_format("deepseek", "<｜tool▁calls▁begin｜>")
def deepseek(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """DeepSeek: R1 and V3 write a type, a name and a block of JSON; V3.1 writes a name and JSON."""
    content, _, rest = text.partition("<｜tool▁calls▁begin｜>")
    _, blocks = _between(rest, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    calls = []
    for block in blocks:
        first, separator, second = block.partition("<｜tool▁sep｜>")
        if not separator:
            raise Malformed("a call has <｜tool▁sep｜> behind its type or name")
        fenced = re.fullmatch(r"([^\n]*)\n```json\n(.*)\n```\s*", second, re.DOTALL)
        name, arguments = (fenced[1], fenced[2]) if fenced else (first, second)
        calls.append(_call({"name": name.strip(), "arguments": _value(arguments)}))
    if rest and not calls:
        raise Malformed("<｜tool▁calls▁begin｜> without a call")
    return content, calls


@call_format("mistral", "[TOOL_CALLS]")
def mistral(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """Mistral: ``[TOOL_CALLS] [{..}, ..]``; later models write ``[TOOL_CALLS]name{..}`` or
    ``name[ARGS]{..}`` for each call."""
    content, *parts = text.split("[TOOL_CALLS]")
    named = re.compile(r"([^\s\[{]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(\{.*)", re.DOTALL)
    calls = []
    for part in map(str.strip, parts):
        name = named.fullmatch(part)
        if name:
            calls.append(_call({"name": name[1], "arguments": _value(name[2])}))
        else:
            calls += _calls(_value(part))
    return content, calls


@call_format("llama", "<|start_header_id|>", '"parameters": ')
def llama(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """Llama 3: ``{"name": .., "parameters": ..}``, several separated by ``;``, perhaps after
    ``<|python_tag|>``."""
    content, tag, rest = text.partition("<|python_tag|>")
    return (content, list(_objects(rest))) if tag else plain_json(text, schemas)


@call_format("json")
def plain_json(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """``{"name": .., "arguments": ..}``, several in a list or one after the other, perhaps in a
    fenced block."""
    start = re.search(r'(?:```(?:json)?\s*)?(?:\[\s*)?\{\s*"name"\s*:', text)
    if not start:
        return text, []
    body = re.sub(r"^```(?:json)?|```\s*$", "", text[start.start() :].strip())
    return text[: start.start()], list(_objects(body))


def _between(text: str, start: str, end: str) -> tuple[str, list[str]]:
    """Return the text before the first block, and the blocks. The last block may lack its end."""
    content, *blocks = text.split(start)
    return content, [block.partition(end)[0] for block in blocks]


def _read_pairs(pattern: re.Pattern[str], text: str, form: str) -> list[tuple[str, str]]:
    """Read the whole text as pairs. Raises Malformed."""
    pairs, at = [], 0
    while match := pattern.match(text, at):
        pairs.append((match[1].strip(), match[2]))
        at = match.end()
    if text[at:].strip():
        raise Malformed(f"an argument is {form}, not {short(text[at:].strip())}")
    return pairs


def _objects(text: str) -> Iterator[ToolCall]:
    at = 0
    while at < len(text):
        value, at = _decode(text, at)
        yield from _calls(value)
        at += len(text[at:]) - len(text[at:].lstrip(" \n\t;,"))


def _calls(value: Any) -> list[ToolCall]:
    return [_call(one) for one in (value if isinstance(value, list) else [value])]


def _call(value: Any) -> ToolCall:
    """Read a call from a dict that holds a name, and arguments as an object or as JSON text."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise Malformed(f'a call is {{"name": .., "arguments": {{..}}}}, not {short(value)}')
    arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
    if isinstance(arguments, str):
        arguments = _value(arguments)
    if not isinstance(arguments, dict):
        raise Malformed(f"the arguments of {value['name']} are not an object")
    return ToolCall(value["name"], arguments)


def _typed_call(name: str, pairs: list[tuple[str, str]], schemas: Schemas) -> ToolCall:
    """Return a call whose arguments are written as text: strings as they are, others as JSON."""
    if not name:
        raise Malformed("a call has no name")
    functions = (schema["function"] for schema in schemas)
    parameters = next((f.get("parameters") for f in functions if f["name"] == name), None) or {}
    properties: Mapping[str, Any] = parameters.get("properties") or {}
    return ToolCall(name, {key: _typed(properties.get(key), text) for key, text in pairs})


def _typed(schema: Any, text: str) -> Any:
    types = _types(schema)
    if types == {"string"} or (types == {"string", "null"} and text.strip() != "null"):
        return text
    try:
        return _value(text)
    except Malformed:
        return text


def _types(schema: Any) -> set[str]:
    """Return the types that a schema names."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type") or []
    choices = map(_types, schema.get("anyOf") or [])
    return {*([named] if isinstance(named, str) else named)}.union(*choices)


def _value(text: str) -> Any:
    """Read the whole text as one JSON value. Raises Malformed."""
    value, end = _decode(text, 0)
    if text[end:].strip():
        raise Malformed(f"behind the JSON stands {short(text[end:].strip())}")
    return value


def _finite(text: str) -> float:
    """Read a number. Raises ValueError for those that JSON cannot hold: NaN, Infinity, 1e999."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


_JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _decode(text: str, at: int) -> tuple[Any, int]:
    at += len(text[at:]) - len(text[at:].lstrip())
    try:
        return _JSON.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON: {short(text[at:].strip())} ({error})") from None
