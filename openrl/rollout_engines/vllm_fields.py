"""Which fields vLLM's ``EngineArgs`` has and which values they take, read from its source:
importing vLLM takes seconds and changes the process."""

from __future__ import annotations

import ast
import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from openrl.errors import UserError
from openrl.flags.values import is_union, show

BUILTIN = {kind.__name__: kind for kind in (bool, int, float, str, list, dict, set, tuple, type)}
TYPING = {name: getattr(typing, name) for name in ("Any", "Literal", "Optional", "Union")}
WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class Section:
    """Base of the stand-ins for vLLM's classes, whose ``fields`` are read from their source."""

    fields: Mapping[str, Any]


def check_engine_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raise UserError for a field that vLLM's EngineArgs does not have, or a value that the field
    does not take; also if there are fields to check and vLLM is not installed."""
    if kwargs and (found := next(wrong_fields(kwargs, engine_args()), None)):
        problem, remedy = found
        raise UserError(f"--vllm_engine_kwargs: {problem}", remedy)


def engine_args() -> type[Section]:
    """Return vLLM's EngineArgs. Raises UserError if vLLM is not installed."""
    found: type[Section] = named("vllm.engine.arg_utils", "AsyncEngineArgs")
    return found


# -- values ----------------------------------------------------------------------------------------


def wrong_fields(
    values: Mapping[str, Any], section: type[Section], inside: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield (problem, remedy) for each of the values that ``section`` does not take."""
    for name, value in values.items():
        if name not in section.fields:
            near = difflib.get_close_matches(name, section.fields, n=1)
            problem = (
                f"vLLM's {section.__name__.removeprefix('Async')} has no field {inside + name!r}"
            )
            yield problem, repr(near[0]) if near else ""
            continue
        kinds = members(section.fields[name])
        inner = next((kind for kind in kinds if has_fields(kind)), None)
        if any(fits(value, kind) for kind in kinds if kind is not inner):
            continue
        if inner and isinstance(value, dict):
            yield from wrong_fields(value, inner, f"{inside}{name}.")
        else:
            words = " or ".join(dict.fromkeys(filter(None, map(in_words, kinds))))
            yield f"{inside}{name}: vLLM does not take {show(value)}", words


def members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if is_union(kind) else (kind,)


def has_fields(kind: Any) -> bool:
    """Return whether a value is a JSON object of known fields; an enumeration has none."""
    return isinstance(kind, type) and issubclass(kind, Section) and bool(kind.fields)


def fits(value: Any, kind: Any) -> bool:
    """Return whether vLLM takes a JSON value for this type; True if only vLLM can tell."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in inner
    if origin in (list, set):
        return isinstance(value, list) and all(
            any(fits(item, member) for member in members(inner[0])) for item in value
        )
    if dict in (kind, origin) or has_fields(kind):
        return isinstance(value, dict)
    if origin is type:  # JSON holds no classes
        return False
    if kind is bool:
        return value in (True, False)
    if kind in (int, float):
        return isinstance(value, (int, float)) and (kind is float or value == int(value))
    return kind not in (str, NoneType) or isinstance(value, kind)


def in_words(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if origin in (list, set):
        return "a list"
    return "a JSON object" if dict in (kind, origin) or has_fields(kind) else WORDS.get(kind, "")


# -- vLLM's source ---------------------------------------------------------------------------------


class Names(dict[str, Any]):
    """What names mean in a module of vLLM."""

    def __init__(self, module: str) -> None:
        super().__init__(BUILTIN | TYPING)
        self.module = module

    def __missing__(self, name: str) -> Any:
        return named(self.module, name)


@cache
def named(module: str, name: str) -> Any:
    """Return the type that a module of vLLM calls by this name; Any if it is not vLLM's own."""
    statement = statements(module).get(name)
    if isinstance(statement, ast.ClassDef):
        return type(name, (Section,), {"fields": dict(fields_of(statement, module))})
    if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value:
        return meaning(statement.value, module)
    if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("vllm"):
        (original,) = (a.name for a in statement.names if (a.asname or a.name) == name)
        return named(str(statement.module), original)
    return Any


def fields_of(cls: ast.ClassDef, module: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a dataclass, and of those that it extends, with their types."""
    for base in cls.bases:
        yield from getattr(meaning(base, module), "fields", {}).items()
    for statement in cls.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, meaning(statement.annotation, module)


def meaning(expression: ast.expr, module: str) -> Any:
    """Return the type that an annotation means; Any if it takes more than names to know."""
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        expression = ast.parse(expression.value, mode="eval").body
    try:
        code = compile(ast.Expression(expression), module, "eval")
        return eval(code, {"__builtins__": {}}, Names(module))
    except (TypeError, AttributeError, NameError):
        return Any


@cache
def statements(module: str) -> dict[str, ast.stmt]:
    """Return the statements that define the names of a module, conditional ones too. Raises
    UserError if vLLM is not installed."""
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise UserError("vLLM is not installed", "pip install vllm")
    path = Path(found.submodule_search_locations[0], *module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {name: statement for statement in flat(tree.body) for name in defined_by(statement)}


def flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try)):
            yield from flat([*statement.body, *statement.orelse])


def defined_by(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    target = statement.target if isinstance(statement, ast.AnnAssign) else None
    return [target.id] if isinstance(target, ast.Name) else []
