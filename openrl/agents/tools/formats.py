"""Reads the calls in a reply, in the formats of several model families.

``parse(text, schemas)`` takes a whole reply without the token that ends it. Where a format writes
arguments without their types, the tools' schemas tell them. If a call does not follow the format,
the policy is told about the error; if one of several calls cannot be read, none is made.

A policy may write anything, for as many tokens as it has, and it is read in the event loop: no
expression here may take longer than the text is long."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from openrl.agents.chat import Schemas
from openrl.agents.tools.calls import Parse, ParsedReply, ToolCall
from openrl.agents.tools.values import (
    Malformed,
    between,
    call_in,
    calls_in,
    literal,
    objects,
    read_all,
    typed_call,
    value_of,
)
from openrl.data.template_forms import REASONING_MARKS
from openrl.errors import short
from openrl.extension_points import tool_parsers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Reader = Callable[[str, Schemas], tuple[str, list[ToolCall]]]


@dataclass(frozen=True)
class CallFormat:
    """A format of calls. ``make`` returns its parser for a tokenizer."""

    make: Callable[[PreTrainedTokenizerBase], Parse]
    marks: tuple[str, ...] = ()
    """What prompts show of it that explain it to the policy, and others do not."""
    library: str = ""  # what ``make`` imports, where that takes seconds


def call_format(name: str, *marks: str) -> Callable[[Reader], Reader]:
    """Register a function that reads the calls after the reasoning and raises Malformed."""

    def add(read: Reader) -> Reader:
        def parse(text: str, schemas: Schemas = ()) -> ParsedReply:
            thought, rest = after_reasoning(text)
            try:
                content, calls = read(rest, schemas)
            except Malformed as error:
                return ParsedReply(text, error=str(error))
            whole = thought + content
            return ParsedReply(whole.rstrip() if calls else whole, tuple(calls))

        tool_parsers.register(name)(CallFormat(lambda tokenizer: parse, marks))
        return read

    return add


def after_reasoning(text: str) -> tuple[str, str]:
    """Split a reply behind its reasoning. One that ends in its reasoning is nothing else."""
    for opening, closing in REASONING_MARKS.items():
        thought, closed, rest = text.rpartition(closing)
        if closed:
            return thought + closed, rest
        if opening in text:
            return text, ""
    return "", text


# -- JSON between marks ----------------------------------------------------------------------------


@call_format("hermes", "<tool_call>")
def hermes(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """Hermes, Qwen 2.5, Qwen 3, Granite 3.1 and 4: ``<tool_call>{"name": .., "arguments": ..}
    </tool_call>``, or a list of these."""
    return _json_between(text, "<tool_call>", "</tool_call>")


@call_format("apriel", "<tool_calls>")
def apriel(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """Apriel: ``<tool_calls>[{"name": .., "arguments": ..}, ..]</tool_calls>``."""
    return _json_between(text, "<tool_calls>", "</tool_calls>")


@call_format("granite", "<|tool_call|>")
def granite(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """Granite 3, Phi 4 mini: ``<|tool_call|>[{"name": .., "arguments": ..}, ..]``, which
    ``<|/tool_call|>`` may end."""
    return _json_between(text, "<|tool_call|>", "<|/tool_call|>")


@call_format("command", "<|START_ACTION|>")
def command(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """Cohere's Command R7B and A: ``<|START_ACTION|>[{"tool_call_id": .., "tool_name": ..,
    "parameters": ..}, ..]<|END_ACTION|>``."""
    return _json_between(text, "<|START_ACTION|>", "<|END_ACTION|>")


def _json_between(text: str, start: str, end: str) -> tuple[str, list[ToolCall]]:
    content, blocks = between(text, start, end)
    return content, [call for block in blocks for call in calls_in(value_of(block))]


@call_format("kimi", "<|tool_calls_section_begin|>")
def kimi(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """Kimi K2: ``<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{..}``. What stands
    before the arguments is the id of the call."""
    content, begun, rest = text.partition("<|tool_calls_section_begin|>")
    _, blocks = between(rest, "<|tool_call_begin|>", "<|tool_call_end|>")
    calls = []
    for block in blocks:
        head, mark, arguments = block.partition("<|tool_call_argument_begin|>")
        name = re.fullmatch(r"(?:functions\.)?([^\s:]+):\d+", head.strip())
        if not mark or not name:
            raise Malformed("a call is functions.NAME:NUMBER<|tool_call_argument_begin|>{..}")
        call = call_in({"name": name[1], "arguments": value_of(arguments)})
        calls.append(replace(call, id=head.strip()))
    if begun and not calls:
        raise Malformed("<|tool_calls_section_begin|> without a call")
    return content, calls


@call_format("deepseek", "<｜tool▁calls▁begin｜>")
def deepseek(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """DeepSeek: R1 and V3 write a type, a name and a block of JSON; V3.1 writes a name and JSON."""
    content, _, rest = text.partition("<｜tool▁calls▁begin｜>")
    _, blocks = between(rest, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    calls = []
    for block in blocks:
        first, separator, second = block.partition("<｜tool▁sep｜>")
        if not separator:
            raise Malformed("a call has <｜tool▁sep｜> behind its type or name")
        fenced = re.fullmatch(r"([^\n]*)\n```json\n(.*)\n```\s*", second, re.DOTALL)
        name, arguments = (fenced[1], fenced[2]) if fenced else (first, second)
        calls.append(call_in({"name": name.strip(), "arguments": value_of(arguments)}))
    if rest and not calls:
        raise Malformed("<｜tool▁calls▁begin｜> without a call")
    return content, calls


@call_format("gpt_oss", " to=functions.")
def gpt_oss(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """gpt-oss: messages that begin with ``<|start|>``, of which those with a recipient
    ``to=functions.NAME`` in the head are calls."""
    spoken, calls = [], []
    for message in text.split("<|start|>"):
        head, _, body = message.partition("<|message|>")
        name = re.search(r"\bto=functions\.([^\s<]+)", head)
        if name:
            arguments = re.split(r"<\|(?:call|end|return)\|>", body, maxsplit=1)[0]
            calls.append(call_in({"name": name[1], "arguments": value_of(arguments)}))
        elif not calls:
            spoken.append(message)
    return "<|start|>".join(spoken), calls


@call_format("mistral", "[TOOL_CALLS]")
def mistral(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """Mistral: ``[TOOL_CALLS] [{..}, ..]``; later models write ``[TOOL_CALLS]name{..}`` or
    ``name[CALL_ID]id[ARGS]{..}`` for each call. Ids have nine letters or digits, as the templates
    demand; the policy's other ids are left out."""
    content, *parts = text.split("[TOOL_CALLS]")
    named = re.compile(
        r"([^\s\[{]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\]\s*)?(\{.*)", re.DOTALL
    )
    calls = []
    for part in map(str.strip, parts):
        name = named.fullmatch(part)
        if name:
            listed = [{"name": name[1], "id": name[2], "arguments": value_of(name[3])}]
        else:
            value = value_of(part)
            listed = value if isinstance(value, list) else [value]
        for call, given in zip(calls_in(listed), listed, strict=True):
            own = str(given.get("id") or "")
            calls.append(replace(call, id=own if re.fullmatch("[A-Za-z0-9]{9}", own) else ""))
    return content, calls


@call_format("llama", "<|start_header_id|>", '"parameters": ')
def llama(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """Llama 3: ``{"name": .., "parameters": ..}``, several separated by ``;``, perhaps after
    ``<|python_tag|>``."""
    content, tag, rest = text.partition("<|python_tag|>")
    return (content, list(objects(rest))) if tag else plain_json(text, schemas)


@call_format("llama_custom", "<function=example_function_name>{")
def llama_custom(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """Llama 3.1's custom tools, Functionary 3.1: ``<function=NAME>{..}</function>``."""
    content, blocks = between(text, "<function=", "</function>")
    named = [block.partition(">") for block in blocks]
    return content, [
        call_in({"name": name.strip(), "arguments": value_of(body)}) for name, _, body in named
    ]


@call_format("functionary", ">>>${recipient}")
def functionary(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """Functionary 3.2: messages that begin with ``>>>``, each with its recipient in its first line.
    Those for ``all`` are spoken; others are calls, with their arguments below."""
    spoken, calls = [], []
    for message in text.removeprefix(">>>").split(">>>"):
        recipient, line, body = message.partition("\n")
        if line and recipient != "all" and re.fullmatch(r"[\w.-]+", recipient):
            calls.append(call_in({"name": recipient, "arguments": value_of(body)}))
        elif not calls:
            spoken.append(message)
    return ">>>".join(spoken), calls


# -- arguments as text -----------------------------------------------------------------------------


@call_format("glm", "<tool_call>", "<arg_key>")
def glm(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """GLM 4: a name, then ``<arg_key>`` and ``<arg_value>`` for each argument."""
    content, blocks = between(text, "<tool_call>", "</tool_call>")
    pair = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
    form = "<arg_key>..</arg_key><arg_value>..</arg_value>"
    calls = []
    for block in blocks:
        name, mark, rest = block.partition("<arg_key>")
        pairs = ((pair[1].strip(), pair[2]) for pair in read_all(pair, mark + rest, form))
        calls.append(typed_call(name.strip(), pairs, schemas))
    return content, calls


@call_format("qwen3_coder", "<tool_call>", "<function=")
def qwen3_coder(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """Qwen 3 Coder, Qwen 3.5, Nemotron 3: ``<function=..>`` with ``<parameter=..>`` for each
    argument."""
    return _functions(text, "<tool_call>", "</tool_call>", schemas)


@call_format("seed_oss", "<seed:tool_call>")
def seed_oss(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """Seed-OSS: as Qwen 3 Coder, between other marks."""
    return _functions(text, "<seed:tool_call>", "</seed:tool_call>", schemas)


def _functions(text: str, start: str, end: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    content, blocks = between(text, start, end)
    pair = re.compile(r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
    calls = []
    for block in blocks:
        function = re.fullmatch(r"\s*<function=([^>]+)>(.*)</function>\s*", block, re.DOTALL)
        if not function:
            raise Malformed("a call is <function=name>..</function>")
        found = read_all(pair, function[2], "<parameter=name>..</parameter>")
        pairs = ((argument[1].strip(), argument[2]) for argument in found)
        calls.append(typed_call(function[1].strip(), pairs, schemas))
    return content, calls


@call_format("minimax", "<minimax:tool_call>")
def minimax(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """MiniMax M2: ``<invoke name="..">`` with ``<parameter name="..">`` for each argument."""
    content, blocks = between(text, "<minimax:tool_call>", "</minimax:tool_call>")
    return content, [call for block in blocks for call in _invoked(block, "", schemas)]


@call_format("deepseek_dsml", "<｜DSML｜")
def deepseek_dsml(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """DeepSeek V3.2 and V4: ``<｜DSML｜invoke name="..">`` with parameters, each of which says
    whether it is a string."""
    content, mark, rest = text.partition("<｜DSML｜")
    outer, _, block = rest.partition(">")
    if mark and outer not in ("function_calls", "tool_calls"):
        raise Malformed("calls begin with <｜DSML｜function_calls>")
    block = block.partition(f"</｜DSML｜{outer}>")[0]
    return content, _invoked(block, "｜DSML｜", schemas) if mark else []


def _invoked(block: str, prefix: str, schemas: Schemas) -> list[ToolCall]:
    """Read the calls of a block, whose tags begin with ``prefix``."""
    before, *invoked = block.split(f"<{prefix}invoke name=")
    if before.strip() or not invoked:
        raise Malformed(f'a call is <{prefix}invoke name="name">..</{prefix}invoke>')
    tag = f"{prefix}parameter"
    argument = re.compile(
        rf'\s*<{tag} name="([^"]*)"(?: string="(true|false)")?>(.*?)</{tag}>\s*', re.DOTALL
    )
    calls = []
    for one in invoked:
        name, _, rest = one.partition(">")
        body, _, behind = rest.partition(f"</{prefix}invoke>")
        if behind.strip():
            raise Malformed(f"behind a call stands {short(behind.strip())}")
        found = read_all(argument, body, f'<{tag} name="name">..</{tag}>')
        call = typed_call(name.strip("\"' "), ((a[1], a[3]) for a in found), schemas)
        strings = {a[1]: a[3] for a in found if a[2] == "true"}
        calls.append(replace(call, arguments={**call.arguments, **strings}))
    return calls


# -- formats with a syntax of their own ------------------------------------------------------------


@call_format("gemma4", "<|tool_call>")
def gemma4(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """Gemma 4: ``<|tool_call>call:NAME{key:<|"|>a text<|"|>,other:2}<tool_call|>``."""
    content, blocks = between(text, "<|tool_call>", "<tool_call|>")
    calls = []
    for block in blocks:
        call = re.fullmatch(r"\s*call:([^\s{]+)\s*(\{.*)", block, re.DOTALL)
        if not call:
            raise Malformed("a call is call:NAME{key:value}")
        calls.append(call_in({"name": call[1], "arguments": value_of(_as_json(call[2]))}))
    return content, calls


def _as_json(text: str) -> str:
    """Return objects whose keys have no quotes, and whose strings are between <|"|>, as JSON."""
    key = re.compile(r"([{,]\s*)([^\s{}\[\],:\"][^{}\[\],:\"]*):")
    parts = text.split('<|"|>')
    parts[::2] = (key.sub(r'\1"\2":', part) for part in parts[::2])
    parts[1::2] = map(json.dumps, parts[1::2])
    return "".join(parts)


_LISTS = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
_CONSTANTS = {"true": True, "false": False, "null": None}


@call_format("pythonic", "<|tool_list_start|>")
def pythonic(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """LFM 2, Llama 4: ``<|tool_call_start|>[name(key="value"), ..]<|tool_call_end|>``, or the list
    alone."""
    for start, end in _LISTS.items():
        content, blocks = between(text, start, end)
        if blocks:
            return content, [call for block in blocks for call in _python_calls(block)]
    listed = re.fullmatch(r"\s*(\[\s*[A-Za-z_][\w.]*\(.*\)\s*\])\s*", text, re.DOTALL)
    return ("", _python_calls(listed[1])) if listed else (text, [])


def _python_calls(block: str) -> list[ToolCall]:
    try:
        found = ast.parse(block.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise Malformed(f"not a list of calls: {short(block.strip())} ({error})") from None
    calls = []
    for call in found.elts if isinstance(found, ast.List) else [found]:
        if not isinstance(call, ast.Call) or call.args:
            raise Malformed(f"a call is name(key=value), not {short(ast.unparse(call))}")
        arguments = {
            str(keyword.arg): _CONSTANTS[keyword.value.id]
            if isinstance(keyword.value, ast.Name) and keyword.value.id in _CONSTANTS
            else literal(ast.unparse(keyword.value))
            for keyword in call.keywords
        }
        calls.append(ToolCall(ast.unparse(call.func), arguments))
    return calls


@call_format("json")
def plain_json(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """``{"name": .., "arguments": ..}``, several in a list or one after the other, perhaps in a
    fenced block."""
    start = re.search(r'(?:```(?:json)?\s*)?(?:\[\s*)?\{\s*"name"\s*:', text)
    if not start:
        return text, []
    body = re.sub(r"^```(?:json)?|```\s*$", "", text[start.start() :].strip())
    return text[: start.start()], list(objects(body))
