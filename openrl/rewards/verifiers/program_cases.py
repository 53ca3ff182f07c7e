"""Reads the tests of programs, which come in several forms, as one list of cases."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from openrl.errors import BadRow, short

_NAMES = ("fn_name", "func_name", "function")


@dataclass(frozen=True)
class Case:
    """One test: a program from standard input to output, a call and its value, or asserts."""

    mode: Literal["program", "call", "asserts"]
    given: Any  # standard input, the list of arguments, or the code of the asserts
    expected: Any = None  # standard output, or the value
    function: str = ""


def read_cases(label: Any, meta: Mapping[str, Any]) -> list[Case]:
    """Return the cases of a label, at least one. ``meta`` may name the function. Raises BadRow."""
    if not isinstance(label, (dict, list, tuple)):
        raise BadRow(f"the label holds no tests: {short(label)}")
    try:
        cases = (
            _of_columns(label, meta)
            if isinstance(label, dict)
            else [_of_item(item, meta) for item in label]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadRow(f"the label holds no tests ({error}): {short(label)}") from None
    if not cases:
        raise BadRow("the label holds no tests: it is empty")
    return cases


def _of_columns(label: dict[str, Any], meta: Mapping[str, Any]) -> list[Case]:
    """Read {"inputs": [..], "outputs": [..], "fn_name": ..} or {"assert_case": [..]}."""
    if "assert_case" in label:
        return [_of_item(item, meta) for item in label["assert_case"]]
    function = _function(label) or _function(meta)
    inputs, outputs = label["inputs"], label["outputs"]
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs, {len(outputs)} outputs")
    return [
        _case(given, expected, function) for given, expected in zip(inputs, outputs, strict=True)
    ]


def _of_item(item: Any, meta: Mapping[str, Any]) -> Case:
    """Read an assert, {"assert_code": ..}, or {"input": .., "output": ..}."""
    if isinstance(item, str):
        return Case("asserts", item)
    if "assert_code" in item:
        return Case("asserts", _text(item["assert_code"]))
    given = item["input"] if "input" in item else item["stdin"]
    expected = item["output"] if "output" in item else item["expected_output"]
    function = _function(item) or _function(meta)
    if item.get("testtype") == "functional" and not function:
        raise ValueError("a functional test without the name of its function, fn_name")
    return _case(given, expected, "" if item.get("testtype") == "stdin" else function)


def _case(given: Any, expected: Any, function: str) -> Case:
    if not function:
        return Case("program", _text(given), _text(expected))
    arguments = (
        [json.loads(line) for line in given.split("\n") if line.strip()]
        if isinstance(given, str)
        else given
    )
    if not isinstance(arguments, list):
        raise ValueError(f"the arguments of {function} are not a list")
    return Case("call", arguments, _value(expected), function)


def _function(names: Mapping[str, Any]) -> str:
    return next((names[name] for name in _NAMES if isinstance(names.get(name), str)), "")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(_text, value))
    if not isinstance(value, str):
        raise TypeError(f"{short(value)} is not text")
    return value


def _value(expected: Any) -> Any:
    """Return the expected value, parsed if it is JSON text."""
    if not isinstance(expected, str):
        return expected
    try:
        return json.loads(expected)
    except ValueError:
        return expected
