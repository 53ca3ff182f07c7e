"""Converts text to values: what a type accepts, how it is shown, and which numbers are allowed."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin

from openrl.files import expanded, read_text

NONE = "None"  # not "none", which is a choice of some flags
BOOL_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


SECONDS, SECONDS_OR_0 = "(0, 1e9]", "[0, 1e9]"
"""The bounds of a time limit; longer ones overflow the clocks of libraries."""


class Quoted(str):
    """A string that was quoted in a YAML file: in it, the word None is text."""


def convert(raw: Any, type_: Any) -> Any:
    """Convert ``raw`` (text or another scalar, None, a list or an object of them) to a value of
    ``type_``. An empty text is None or an empty list where the type has these. Raises ValueError
    with a readable reason."""
    if is_union(type_):
        return _convert_union(raw, type_)
    if get_origin(type_) is tuple:
        return _convert_tuple(raw, get_args(type_))
    if get_origin(type_) is dict:
        return _convert_mapping(raw, type_)
    if raw is None or isinstance(raw, (list, dict)):
        raise ValueError(f"expected {expected(type_)}, got {show(raw)}")
    text = str(raw)
    if type_ is str:
        if "\0" in text:  # YAML can write it, but no path may hold it
            raise ValueError(f"expected text, got {show(text)}")
        # a shell expands ~ only where a word begins with it, not in --flag=~/model; Path would also
        # change text that is no path
        return os.path.expanduser(text) if "/" in text else text  # noqa: PTH111
    if type_ in (int, float):
        return _convert_number(text, type_)
    choices = BOOL_WORDS if type_ is bool else {str(choice): choice for choice in get_args(type_)}
    word = text.lower() if type_ is bool else text
    if word not in choices:
        raise ValueError(f"expected {expected(type_)}, got {show(text)}")
    return choices[word]


def _convert_union(raw: Any, type_: Any) -> Any:
    members = get_args(type_)
    alone = raw[0] if isinstance(raw, list) and len(raw) == 1 else raw  # a list of one word
    nothing = alone in (None, "") or (alone == NONE and not isinstance(alone, Quoted))
    if type(None) in members and nothing:
        return None
    for member in members:
        if member is not type(None):
            with contextlib.suppress(ValueError):
                return convert(raw, member)
    raise ValueError(f"expected {expected(type_)}, got {show(raw)}")


def _convert_tuple(raw: Any, members: tuple[Any, ...]) -> tuple[Any, ...]:
    items = raw if isinstance(raw, list) else [raw]
    if members[-1] is Ellipsis:
        items = [] if raw == "" else items
        return tuple(convert(item, members[0]) for item in items)
    if len(items) != len(members):
        raise ValueError(f"expected {len(members)} values, got {len(items)}: {show(items)}")
    return tuple(convert(item, member) for item, member in zip(items, members, strict=True))


def _convert_mapping(raw: Any, type_: Any) -> dict[str, Any]:
    """Convert a JSON object, the name of a file that holds one, or a mapping in a YAML file."""
    if isinstance(raw, dict):
        return {key: _json_value(value) for key, value in raw.items()}
    if not isinstance(raw, str):
        raise ValueError(f"expected {expected(type_)}, got {show(raw)}")
    source = ""
    try:
        if not raw.lstrip().startswith("{") and expanded(raw).exists():
            source = f" in {raw}"
        value = json.loads(read_text(raw) if source else raw)
    except OSError as error:
        raise ValueError(f"cannot read {raw[:60]}: {error.strerror}") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"expected {expected(type_)}, got {show(raw)}: {error}{source}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected {expected(type_)}, got {show(value)}{source}")
    return value


def _json_value(raw: Any) -> Any:
    """Convert a value inside a mapping. Scalars of a YAML file are still text: they become what
    JSON makes of them, with True and False as YAML has them, or stay text."""
    if isinstance(raw, dict):
        return {key: _json_value(value) for key, value in raw.items()}
    if isinstance(raw, list):
        return [_json_value(value) for value in raw]
    if isinstance(raw, Quoted):
        return str(raw)
    if isinstance(raw, str):
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(raw.lower() if raw in ("True", "False") else raw)
    return raw


def _convert_number(raw: str, type_: type) -> int | float:
    """Convert a number. 1e6 is whole too, because people write --max_samples 1e6."""
    try:
        number = float(raw.replace(".inf", "inf"))  # .inf is YAML's spelling
    except ValueError:
        number = float("nan")
    if number != number or (type_ is int and not number.is_integer()):
        raise ValueError(f"expected {expected(type_)}, got {show(raw)}")
    if type_ is float:
        return number
    return int(raw) if re.fullmatch(r"[+-]?\d+", raw) else int(number)


def is_union(type_: Any) -> bool:
    return get_origin(type_) in (Union, types.UnionType)


def without_none(type_: Any) -> Any:
    """Turn ``bool | None`` into ``bool``; unions of several other types stay as they are."""
    members = [m for m in get_args(type_) if m is not type(None)] if is_union(type_) else []
    return members[0] if len(members) == 1 else type_


def is_switch(type_: Any) -> bool:
    """Return whether a flag is turned on without a value, and so has a --no_ form."""
    inner = without_none(type_)
    return inner is bool or (is_union(inner) and bool in get_args(inner))


def is_mapping(type_: Any) -> bool:
    """Return whether a flag takes a JSON object."""
    return get_origin(without_none(type_)) is dict


def expected(type_: Any) -> str:
    """Name the type for a message: "a whole number", "one of vllm, hf", "2 values"."""
    if is_union(type_):
        return " or ".join("None" if m is type(None) else expected(m) for m in get_args(type_))
    if get_origin(type_) is tuple:
        members = get_args(type_)
        return "a list" if members[-1] is Ellipsis else f"{len(members)} values"
    if get_origin(type_) is Literal:
        return "one of " + ", ".join(map(str, get_args(type_)))
    if get_origin(type_) is dict:
        return "a JSON object"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[type_]


def placeholder(type_: Any) -> str:
    """Return what ``--help`` shows after the flag: "INT", "FLOAT FLOAT", "TEXT ...", "{vllm,hf}";
    empty for a switch."""
    type_ = without_none(type_)
    if is_union(type_):
        forms = [placeholder(m) for m in get_args(type_) if m is not type(None)]
        return "|".join(forms) if all(forms) else f"[{'|'.join(filter(None, forms))}]"
    if get_origin(type_) is tuple:
        return " ".join("..." if m is Ellipsis else placeholder(m) for m in get_args(type_))
    if get_origin(type_) is Literal:
        return "{" + ",".join(map(str, get_args(type_))) + "}"
    if get_origin(type_) is dict:
        return "JSON"
    return {int: "INT", float: "FLOAT", bool: "", str: "TEXT"}[type_]


def show(value: Any) -> str:
    """Return a value as one would type it: 0.9 0.95, None, 'two words'."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(show, value)) if value else "nothing"
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, str):
        return repr(str(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


def unknown_keys(keys: Iterable[str], known: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each of ``keys`` that is not ``known``, with the known one that it resembles, or ""."""
    known = list(known)
    for key in keys:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)  # YAML has keys that are no text
            yield key, near[0] if near else ""


def within(value: Any, bounds: str) -> bool:
    """Return whether a number, or each of a tuple, keeps to ``bounds``; None and text always do.

    Grammar: terms joined by " and "; a term is a list of alternatives joined by " or ", each a
    number ("-1"), a comparison ("> 0", "<= 1") or an interval ("(0, 1]", "[0, 1)"). The term
    "increasing" requires a tuple in strictly rising order.
    """
    items = value if isinstance(value, tuple) else (value,)
    numbers = [
        item for item in items if isinstance(item, (int, float)) and not isinstance(item, bool)
    ]
    for term in filter(None, bounds.split(" and ")):
        if term == "increasing":
            if any(low >= high for low, high in pairwise(numbers)):
                return False
        elif not all(
            any(_allows(choice, number) for choice in term.split(" or ")) for number in numbers
        ):
            return False
    return True


def _allows(choice: str, number: float) -> bool:
    interval = re.fullmatch(r"([\[(])(.+), (.+)([\])])", choice)
    if interval:
        opening, low, high, closing = interval.groups()
        above = _COMPARISONS[">=" if opening == "[" else ">"](number, float(low))
        return above and _COMPARISONS["<=" if closing == "]" else "<"](number, float(high))
    sign, _, limit = choice.rpartition(" ")
    return _COMPARISONS[sign](number, float(limit)) if sign else number == float(limit)
