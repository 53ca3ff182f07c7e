"""What formats of calls have in common: blocks between marks, and arguments as JSON or as text."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from openrl.agents.chat import Schemas
from openrl.agents.tools.calls import ToolCall
from openrl.errors import short

_NAMES, _ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters")


class Malformed(Exception):
    """A call cannot be read; the message says why."""


def between(text: str, start: str, end: str) -> tuple[str, list[str]]:
    """Return the text before the first block, and the blocks. The last block may lack its end."""
    content, *blocks = text.split(start)
    return content, [block.partition(end)[0] for block in blocks]


def read_all(pattern: re.Pattern[str], text: str, form: str) -> list[re.Match[str]]:
    """Read the whole text as repetitions of a pattern. Raises Malformed."""
    found, at = [], 0
    while match := pattern.match(text, at):
        found.append(match)
        at = match.end()
    if text[at:].strip():
        raise Malformed(f"an argument is {form}, not {short(text[at:].strip())}")
    return found


def objects(text: str) -> Iterator[ToolCall]:
    at = 0
    while at < len(text):
        value, at = _decode(text, at)
        yield from calls_in(value)
        at += len(text[at:]) - len(text[at:].lstrip(" \n\t;,"))


def calls_in(value: Any) -> list[ToolCall]:
    return [call_in(one) for one in (value if isinstance(value, list) else [value])]


def call_in(value: Any) -> ToolCall:
    """Read a call from a dict that holds a name, and arguments as an object or as JSON text. None
    are an empty object, as for functions that take none."""
    found = next((value[k] for k in _NAMES if k in value), None) if isinstance(value, dict) else ""
    if not isinstance(found, str) or not found:
        raise Malformed(f'a call is {{"name": .., "arguments": {{..}}}}, not {short(value)}')
    arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
    if isinstance(arguments, str):
        arguments = value_of(arguments) if arguments.strip() else None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Malformed(f"the arguments of {found} are not an object")
    return ToolCall(found, arguments)


def typed_call(name: str, pairs: Iterable[tuple[str, str]], schemas: Schemas) -> ToolCall:
    """Return a call whose arguments are written as text: strings as they are, others as JSON, or as
    Python prints them."""
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
    with suppress(Malformed):
        return value_of(text)
    if types and "string" not in types:
        with suppress(Malformed):
            return literal(text)
    return text


def literal(text: str) -> Any:
    """Read the whole text as a Python literal of values that JSON can hold. Raises Malformed."""
    try:
        return value_of(json.dumps(ast.literal_eval(text.strip())))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise Malformed(f"not a Python literal: {short(text.strip())} ({error})") from None


def _types(schema: Any) -> set[str]:
    """Return the types that a schema names."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type") or []
    choices = map(_types, schema.get("anyOf") or [])
    return {*([named] if isinstance(named, str) else named)}.union(*choices)


def value_of(text: str) -> Any:
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
