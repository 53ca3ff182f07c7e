"""The check of --vllm_engine_kwargs against the fields of vLLM's ``EngineArgs`` and their types. It
runs in a process of its own: importing vLLM takes seconds and changes the process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any, Literal, get_args, get_origin

from openrl.errors import UserError
from openrl.flags.values import is_union, show, unknown_keys

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
IMPORT_S = 600  # seconds that the import of vLLM may take


def check_engine_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raise UserError for a field that vLLM's EngineArgs does not have, or a value that the field
    does not take; also if there are fields to check and vLLM is not installed."""
    if not kwargs:
        return
    if find_spec("vllm") is None:
        raise UserError("vLLM is not installed", "pip install vllm")
    if found := first_wrong_field_apart(json.dumps(kwargs)):
        problem, remedy = found
        raise UserError(f"--vllm_engine_kwargs: {problem}", remedy)


@cache
def first_wrong_field_apart(kwargs: str) -> tuple[str, str] | None:
    """``first_wrong_field`` of the JSON text ``kwargs``, from another process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(first_wrong_field, json.loads(kwargs)).result(IMPORT_S)


def first_wrong_field(kwargs: Mapping[str, Any]) -> tuple[str, str] | None:
    """Import vLLM, whose output is dropped, and return the first of ``wrong_fields``."""
    silent = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(silent, output)
    from vllm import AsyncEngineArgs

    return next(wrong_fields(kwargs, AsyncEngineArgs), None)


def wrong_fields(
    values: Mapping[str, Any], section: type, inside: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield (problem, remedy) for each of the values that ``section``, a dataclass of vLLM, does
    not take."""
    kinds = {field.name: field.type for field in fields(section)}
    for name, near in unknown_keys(values, kinds):
        kind = section.__name__.removeprefix("Async")
        yield f"vLLM's {kind} has no field {inside + name!r}", repr(near) if near else ""
    for name, value in values.items():
        if name not in kinds:
            continue
        members = members_of(kinds[name])
        inner = next((member for member in members if is_dataclass(member)), None)
        if isinstance(inner, type) and isinstance(value, dict):
            yield from wrong_fields(value, inner, f"{inside}{name}.")
        elif not any(takes(member, value) for member in members):
            words = " or ".join(dict.fromkeys(filter(None, map(in_words, members))))
            yield f"{inside}{name}: vLLM does not take {show(value)}", words


def members_of(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if is_union(kind) else (kind,)


def takes(kind: Any, value: Any) -> bool:
    """Return whether vLLM takes a JSON value for this type; True if only vLLM can tell."""
    from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

    if is_dataclass(kind):
        return False
    if isinstance(kind, str) or (isinstance(kind, type) and issubclass(kind, Enum)):
        return True
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    except PydanticSchemaGenerationError:
        return True
    return True


def in_words(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if origin in (list, set):
        return "a list"
    return "a JSON object" if dict in (kind, origin) or is_dataclass(kind) else WORDS.get(kind, "")
