"""Flags that several keys of another system decide.

A table flags.tsv beside keys.tsv has rows in tab-separated columns:

    flag      what to give; =NAME is no flag but a name for the value, for the rows below
    value     an expression over keys, see ``Formulas``; empty: nothing to give, the note says why
    when      a condition; the first row of a flag counts that has a value and whose condition holds
    how       as in keys.tsv, for the value or each item of it
    commands  names of the commands that the row is for; empty: all
    verdict   one of VERDICTS; empty: converted
    note      one sentence; {expression} in it is filled in
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from openrl.config.importing.tables import LEFT_OUT, Keys, choose, plain, table_lines
from openrl.config.importing.values import Written, put, unresolved
from openrl.errors import UserError, short
from openrl.extension_points import config_tables
from openrl.flags.checks import problem
from openrl.flags.sources import from_yaml


@dataclass(frozen=True)
class Computed:
    """A flag that several keys decide. Nothing to give: ``value`` is None."""

    flag: str
    value: Any
    keys: tuple[str, ...]
    note: str = ""
    verdict: str = "converted"


class GivenKeys:
    """The values of a file with the defaults of its system. What cannot be read is kept in
    ``problems``, and its default counts."""

    def __init__(self, values: Mapping[str, Written], keys: Keys) -> None:
        self.values, self._keys = values, keys
        self.problems: dict[str, UserError] = {}

    def given(self, key: str) -> bool:
        return key in self.values and plain(self.values[key].raw) != "null"

    def raw(self, key: str) -> Any:
        """Return a value, or the default there; None if there is none."""
        if key in self.values:
            written = self.values[key]
            if not (what := unresolved(written.raw)):
                return written.raw
            self.problems[key] = no_value(key, what, written)
        return self._default(key)

    def _default(self, key: str) -> Any:
        row = self._keys.row(key)
        return None if row is None else row.default_raw

    def text(self, key: str) -> str:
        raw = self.raw(key)
        return "" if raw is None or plain(raw) == "null" else plain(raw)

    def on(self, key: str) -> bool:
        return self.text(key) in ("true", "1", "True")

    def number(self, key: str, otherwise: float = 0.0) -> float:
        for raw in (self.raw(key), self._default(key)):
            try:
                number = otherwise if raw is None or plain(raw) == "null" else float(raw)
                if math.isfinite(number):
                    return number
            except (TypeError, ValueError):
                pass
            self.problems[key] = not_a_number(key, raw)
        return otherwise

    def whole(self, key: str, otherwise: int = 0) -> int:
        return int(self.number(key, otherwise))

    def items(self, key: str) -> list[str]:
        """Return the items of a list, which may be written as one text."""
        raw = self.raw(key)
        if isinstance(raw, list):
            return [str(item).strip(",") for item in raw]  # --modules "q_proj", "v_proj"
        text = "" if raw is None or plain(raw) == "null" else str(raw)
        return re.findall(r"[^\s,'\"\[\]()]+", text)

    def below(self, prefix: str) -> list[str]:
        """Return the keys that are given and begin with this one."""
        return [key for key in self.values if key.startswith(f"{prefix}.")]


def not_a_number(key: str, raw: Any) -> UserError:
    return problem((), f"{key}: expected a number, got {short(raw)}")


def no_value(key: str, what: str, written: Written) -> UserError:
    message = f"{key}: {what} has no value{written.where}"
    argument = re.fullmatch(r"\$\{?\d\}?", what)
    by = 'the script and its arguments in quotes: "run.sh ..."' if argument else "export it before"
    return problem((), message, f"{by}, or write the value")


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b if b else 0.0, ast.FloorDiv: lambda a, b: a // b if b else 0.0,
}  # fmt: skip
_ORDER: dict[type, Callable[[Any, Any], bool]] = {
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le,
}  # fmt: skip


class Formulas:
    """Reads the expressions of a table with the keys of one file.

    A name is a key, or what ``=NAME`` named. By itself it stands for the value as it is written; in
    arithmetic and within brackets it is a number, compared with a text it is a text, and where a
    condition is expected it is whether the key is on. ``[a, b]`` is a list, ``f"{a}/b"`` a text,
    ``a or b`` the first that is not empty. Functions:

        given(a)        whether a key is given and not null
        first(a, b)     the value of the first key that is given, else that of the last
        least(a, b)     the smallest of those that are given
        items(a)        the items of a list; joined(a) the same with commas between
        among(a, "x")   the items of a list that are among the others
        before(a, "@")  the items of a list up to a mark, joined; after(a, "@") the first rest
        contains(a, "x")    whether a value has a text within, in small letters
        below(a, "x")   what the keys below a hold, nested, but for those below a.x
        part(a, "x")    what a value that is a mapping has for x
        found(a, "x")   the first group of a pattern in a text of small letters
        max min round ceil
    """

    def __init__(self, keys: GivenKeys) -> None:
        self._keys = keys
        self._named: dict[str, ast.expr] = {}

    def computed(self, rows: Sequence[Mapping[str, str]], command: str) -> Iterator[Computed]:
        """Yield what the rows of a table say for a command."""
        taken: set[str] = set()
        for row in rows:
            flag, commands = row["flag"], row["commands"].split()
            if flag in taken or (commands and command not in commands):
                continue
            value, when = _parsed(row["value"] or "None"), _parsed(row["when"] or "True")
            if flag.startswith("="):
                self._named[flag[1:]] = value
                continue
            if not self.holds(when):
                continue
            found = self._chosen(row["how"], self.value(value))
            if row["value"]:
                if found in (None, "", [], {}, LEFT_OUT):
                    continue
                taken.add(flag)
            keys = self.keys_in(value) or self.keys_in(when)
            note = re.sub(
                r"\{([^{}]+)\}", lambda m: _number(self.number(_parsed(m[1]))), row["note"]
            )
            yield Computed(flag, found, tuple(keys), note, row["verdict"] or "converted")

    def _chosen(self, how: str, value: Any) -> Any:
        if how and isinstance(value, list):
            found = [choose(how, item) for item in value]
            return list(dict.fromkeys(item for item in found if item != LEFT_OUT))
        return choose(how, value) if how and value is not None else value

    def keys_in(self, node: ast.AST) -> list[str]:
        """Return the keys of an expression, in their order."""
        match node:
            case ast.Call(func=ast.Name(id="below"), args=[prefix, *_]):
                return self._keys.below(self.key(prefix))
            case ast.Name() | ast.Attribute():
                name = ast.unparse(node)
                return self.keys_in(self._named[name]) if name in self._named else [name]
        parts = node.args if isinstance(node, ast.Call) else ast.iter_child_nodes(node)
        return list(dict.fromkeys(key for part in parts for key in self.keys_in(part)))

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() | ast.Attribute():
                name = ast.unparse(node)
                if name in self._named:
                    return self.value(self._named[name])
                raw = self._keys.raw(name)
                return None if plain(raw) == "null" else raw
            case ast.List():
                return [self._item(item) for item in node.elts]
            case ast.BinOp():
                return _BINARY[type(node.op)](self.number(node.left), self.number(node.right))
            case ast.UnaryOp(op=ast.USub()):
                return -self.number(node.operand)
            case ast.BoolOp(op=ast.Or()):
                return next(filter(None, map(self.value, node.values)), self.value(node.values[-1]))
            case ast.IfExp():
                return self.value(node.body if self.holds(node.test) else node.orelse)
            case ast.JoinedStr():
                return "".join(map(self.text, node.values))
            case ast.FormattedValue():
                return self.text(node.value)
            case ast.Call(func=ast.Name(id=name)):
                return _FUNCTIONS[name](self, *node.args)
        return self.holds(node)

    def _item(self, node: ast.expr) -> str:
        return str(node.value if isinstance(node, ast.Constant) else self.number(node))

    def number(self, node: ast.expr) -> float:
        if key := self.key(node):
            return self._keys.number(key)
        value = self.value(node)
        try:
            return float(value or 0)
        except (TypeError, ValueError):
            key = next(filter(self._keys.given, self.keys_in(node)), ast.unparse(node))
            self._keys.problems[key] = not_a_number(key, value)
            return 0.0

    def text(self, node: ast.expr) -> str:
        value = self.value(node)
        return "" if value is None else plain(value)

    def items(self, node: ast.expr) -> list[str]:
        return self._keys.items(self.key(node))

    def given(self, node: ast.expr) -> bool:
        return self._keys.given(self.key(node))

    def below(self, node: ast.expr, *others: ast.expr) -> dict[str, Any]:
        prefix = self.key(node)
        found: dict[str, Any] = {}
        without = [f"{prefix}.{self.text(other)}" for other in others]
        for key in self._keys.below(prefix):
            if not any(f"{key}.".startswith(f"{other}.") for other in without):
                put(found, key.removeprefix(f"{prefix}."), self._keys.raw(key))
        return found

    def key(self, node: ast.expr) -> str:
        """Return the key that an expression is, or an empty text."""
        name = ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""
        return "" if name in self._named else name

    def holds(self, node: ast.expr) -> bool:
        match node:
            case ast.BoolOp(op=ast.And()):
                return all(map(self.holds, node.values))
            case ast.BoolOp():
                return any(map(self.holds, node.values))
            case ast.UnaryOp(op=ast.Not()):
                return not self.holds(node.operand)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._compared(left, op, right)
            case ast.Name(id=name) if name in self._named:
                return self.holds(self._named[name])
        value = self.value(node)
        return plain(value) in ("true", "1") if isinstance(value, str) else bool(value)

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> bool:
        if type(op) in _ORDER:
            return _ORDER[type(op)](self.number(left), self.number(right))
        if isinstance(right, ast.Tuple):
            found = self.text(left) in map(self.text, right.elts)
        elif isinstance(op, (ast.In, ast.NotIn)):
            found = self.text(left) in self.items(right)
        elif isinstance(right, ast.Constant) and not isinstance(right.value, str):
            found = self.number(left) == right.value
        else:
            found = self.text(left) == self.text(right)
        return found != isinstance(op, (ast.NotIn, ast.NotEq))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "given": Formulas.given,
    "first": lambda f, *keys: f.value(next(filter(f.given, keys), keys[-1])),
    "least": lambda f, *keys: min(map(f.number, filter(f.given, keys)), default=None),
    "items": Formulas.items,
    "joined": lambda f, key, *mark: (f.text(*mark) if mark else ",").join(f.items(key)),
    "among": lambda f, key, *texts: [x for x in f.items(key) if x in map(f.text, texts)],
    "before": lambda f, key, mark: ",".join(x.partition(f.text(mark))[0] for x in f.items(key)),
    "after": lambda f, key, mark: min(
        filter(None, (x.partition(f.text(mark))[2] for x in f.items(key))), default=None
    ),
    "contains": lambda f, key, part: f.text(part) in ",".join(f.items(key)).lower(),
    "below": Formulas.below,
    "part": lambda f, key, name: _mapping(f.value(key)).get(name.value),
    "found": lambda f, key, form: (re.search(form.value, f.text(key).lower()) or ("", ""))[1],
    "max": lambda f, *numbers: max(map(f.number, numbers)),
    "min": lambda f, *numbers: min(map(f.number, numbers)),
    "round": lambda f, number, digits: round(f.number(number), digits.value),
    "ceil": lambda f, number: math.ceil(f.number(number)),
}


def _mapping(raw: Any) -> Mapping[str, Any]:
    raw = from_yaml(raw) if isinstance(raw, str) else raw
    return raw if isinstance(raw, Mapping) else {}


_parsed = cache(lambda text: ast.parse(text, mode="eval").body)


def _number(value: float) -> str:
    return f"{value:g}" if value < 1e6 else str(int(value))


@cache
def rows_of(system: str) -> list[dict[str, str]]:
    """Return the rows of a system's flags.tsv; none if it has no such table."""
    path = config_tables[system].component.path.with_name("flags.tsv")
    return table_lines(path) if path.exists() else []
