"""The keys of a nested file, with references between them filled in."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openrl.config.importing.tables import Keys
from openrl.flags.values import Quoted

REFERENCE = re.compile(r"\$\{([^${}]*)\}")
SECRET = re.compile(r"(api_?key|token|secret|password)s?$", re.I)


@dataclass(frozen=True)
class Written:
    """One value that stands in a file or a command line of another system."""

    raw: Any  # text, None, a list or a dict
    where: str = ""  # " (run.yaml, line 3)"


def flat(prefix: str, value: Any, where: str = "", keys: Keys | None = None) -> dict[str, Written]:
    """Return the leaves of a mapping by their dotted keys. A mapping that a table takes as one
    value stays whole."""
    if not isinstance(value, Mapping) or not value or (keys and keys.ends_at(prefix)):
        return {prefix: Written(value, where)}
    leaves: dict[str, Written] = {}
    for name, inner in value.items():
        leaves |= flat(f"{prefix}.{name}" if prefix else str(name), inner, where, keys)
    return leaves


# <path_to_model>, <YOUR_KEY>, but not </tool_call>, <think> or <|im_end|>
_PLACEHOLDER = r"<(?:(?i:your|my|path|insert|local)[^<>]*|[A-Z][A-Z0-9_ -]+)>"


def unresolved(raw: Any) -> str:
    """Return the first reference in a value that nothing has filled in, or an empty text."""
    if isinstance(raw, list):
        return next(filter(None, map(unresolved, raw)), "")
    if isinstance(raw, Mapping):
        return next(filter(None, map(unresolved, raw.values())), "")
    found = (
        re.search(rf"\$\{{[^}}]*\}}|\$\w+|\$\(.*\)|{_PLACEHOLDER}|\?\?\?", raw)
        if isinstance(raw, str)
        else None
    )
    return found[0] if found else ""


def references(value: Any) -> set[str]:
    """Return the first parts of the keys that ``${...}`` in a nested mapping stand for."""
    if isinstance(value, Mapping):
        return set().union(*map(references, value.values()))
    if isinstance(value, list):
        return set().union(*map(references, value))
    return (
        {name.split(".")[0] for name in REFERENCE.findall(value)}
        if isinstance(value, str)
        else set()
    )


def resolve(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in ``${key}``, ``${.sibling}``, ``${oc.env:NAME,default}`` and
    ``${oc.select:key,default}`` in a nested mapping, as OmegaConf does. What does not resolve stays
    as it is."""
    return {name: _filled(value, tree, (name,), ()) for name, value in tree.items()}


def _filled(value: Any, tree: Mapping[str, Any], at: tuple[str, ...], seen: tuple[str, ...]) -> Any:
    if isinstance(value, Mapping):
        return {k: _filled(v, tree, (*at, str(k)), seen) for k, v in value.items()}
    if isinstance(value, list):
        return [_filled(item, tree, at, seen) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    if whole := REFERENCE.fullmatch(value.strip()):
        found = _looked_up(whole[1], tree, at, seen)
        return value if found is MISSING else found
    for _ in range(10):  # references may stand within references
        text = REFERENCE.sub(lambda m: _as_text(_looked_up(m[1], tree, at, seen), m[0]), value)
        if text == value:
            break
        value = text
    return Quoted(value) if isinstance(value, Quoted) else value


MISSING = object()


def _as_text(found: Any, otherwise: str) -> str:
    return str(found) if isinstance(found, str) else otherwise


def _looked_up(
    name: str, tree: Mapping[str, Any], at: tuple[str, ...], seen: tuple[str, ...]
) -> Any:
    """Return what a reference stands for. MISSING: nothing, or something that refers to itself."""
    resolver, colon, rest = name.partition(":")
    key, comma, default = rest.partition(",") if colon else (name, "", "")
    if resolver == "oc.env":
        found: Any = MISSING if SECRET.search(key) else os.environ.get(key, MISSING)
    else:
        key = _absolute(key.strip(), at)
        found = MISSING if key in seen or (colon and resolver != "oc.select") else _get(tree, key)
        if found is not MISSING:
            found = _filled(found, tree, tuple(key.split(".")), (*seen, key))
    return default.strip() if found is MISSING and comma else found


def _absolute(key: str, at: tuple[str, ...]) -> str:
    dots = len(key) - len(key.lstrip("."))
    return ".".join((*at[: len(at) - dots], key.lstrip("."))) if dots else key


def _get(tree: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return MISSING
        tree = tree[part]
    return tree


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of a nested mapping, as a word key=value of a command line does."""
    *parents, last = key.split(".")
    for part in parents:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[last] = value


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return two nested mappings as one, in which ``above`` wins."""
    both = dict(below)
    for name, value in above.items():
        old = both.get(name)
        nested = isinstance(old, Mapping) and isinstance(value, Mapping)
        both[name] = merged(old, value) if nested else value  # type: ignore[arg-type]
    return both
