"""The commands in a shell script, with its variables filled in. Nothing is run: of every ``if``
both branches are read, so the last assignment counts, and what a program would print stays
``$(...)``. Of a ``case`` whose word has a value only the branch that matches is read."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from openrl.config.importing.values import SECRET

_CALL = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_QUOTES = rf'"(?:\\.|{_CALL}|[^"\\$]|\$(?!\())*"'
TOKEN = re.compile(
    rf"""(?P<skip>\\\n|[ \t\r]+|(?<![^\s;])\#[^\n]*|&?\d?>>?&?\s*[^\s;|&]+|<<<|<\s*[^\s;|&(]+)
      | (?P<end>\n|;;|;|&&|\|\||\||&)
      | (?P<word>(?: '[^']*' | {_QUOTES} | \$\(\((?:[^()]|\([^()]*\))*\)\) | {_CALL}
            | \$\{{(?:[^{{}}]|\$\{{[^{{}}]*\}})*\}}
            | \\[^\n] | \$ | [^\s;&|'"\\$] )+)
      | (?P<other>.)""",
    re.X | re.S,
)
_REFERENCE = rf"\$\(\(.*?\)\)(?!\))|{_CALL}|" + r"\$\{(?:[^{}]|\$\{[^{}]*\})*\}|\$\w+|\$[@*]"
PIECE = re.compile(
    rf"(?P<single>'[^']*')|(?P<double>{_QUOTES})|\\(?P<escaped>.)"
    rf"|(?P<reference>{_REFERENCE})",
    re.S,
)
QUOTED = re.compile(rf"""\\(["\\$`\n])|({_REFERENCE})""", re.S)
"""What acts within double quotes."""
HEREDOC = re.compile(
    r"read\s+[^\n]*?(\w+)\s*<<-?\s*['\"]?(\w+)['\"]?\n(.*?)\n\2[ \t]*(?=\n|$)", re.S
)
ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.S)
DECLARES = {"export", "declare", "local", "readonly", "typeset"}
KEYWORDS = {"then", "else", "do", "if", "elif", "{", "}", "fi", "done", "!", "exec", "time"}


@dataclass
class ShellCase:
    """A ``case`` that is being read."""

    word: str  # empty: it has no value, so all branches are read
    taken: bool = False  # a branch has matched
    active: bool = False  # the present branch is read
    patterns: list[str] | None = field(default_factory=list)  # None: within a branch

    def opened(self, raw: list[str]) -> list[str]:
        """Take patterns off a statement, and return what follows them."""
        end = next((i for i, word in enumerate(raw) if word.endswith(")")), None)
        if self.patterns is None:
            return raw
        self.patterns += raw if end is None else raw[: end + 1]
        if end is None:  # one of several: a | b)
            return []
        bare = [pattern.strip("()'\"") for pattern in self.patterns]
        found = not self.taken and any(fnmatchcase(self.word, p) for p in bare if p)
        self.active, self.taken = found or not self.word, self.taken or found
        self.patterns = None
        return raw[end + 1 :]


class Script:
    """Reads one script. ``commands`` are the words of each; ``variables`` what it sets;
    ``undecided`` the words of each ``case`` that have no value."""

    def __init__(self, text: str, path: Path, arguments: Sequence[str] = ()) -> None:
        self.variables: dict[str, str | list[str]] = {"0": str(path), "BASH_SOURCE": str(path)}
        self.variables |= {str(i): word for i, word in enumerate(arguments, 1)}
        self._arguments = arguments
        self.commands: list[list[str]] = []
        self.undecided: list[str] = []
        self._cases: list[ShellCase] = []
        for name, _, body in HEREDOC.findall(text):
            self.variables[name] = re.sub(r"\\\n", " ", body)
        for words in _statements(HEREDOC.sub("", text)):
            self._read(words)

    def _read(self, raw: list[str]) -> None:
        raw = self._within_cases(raw)
        declares = bool(raw) and raw[0] in DECLARES
        words = [w for w in raw[1:] if not w.startswith("-")] if declares else list(raw)
        while words and (found := ASSIGNMENT.fullmatch(words[0])):
            name, plus, value = found.groups()
            words.pop(0)
            if value.startswith("("):
                items = [value[1:]]
                while not _closes(items[-1]) and words:
                    items.append(words.pop(0))
                items[-1] = items[-1].rstrip()[:-1]
                old = self.variables.get(name) if plus else []
                more = [word for item in items if item for word in self._expanded(item)]
                self.variables[name] = [*(old if isinstance(old, list) else []), *more]
            else:
                before = self._value(name) if plus else ""
                self.variables[name] = before + " ".join(self._expanded(value, split=False))
        if words and not declares:
            self.commands.append([word for w in words for word in self._expanded(w)])

    def _within_cases(self, raw: list[str]) -> list[str]:
        """Return what is read of a statement without the words of ``case``."""
        while raw:
            case = self._cases[-1] if self._cases else None
            if raw[0] in KEYWORDS:
                raw = raw[1:]
            elif raw[0] == "case" and raw[2:3] == ["in"]:
                word = " ".join(self._expanded(raw[1], split=False))
                if "$" in word:
                    self.undecided += [] if re.fullmatch(r"\$\{\d\}", word) else [word]
                    word = ""
                self._cases.append(ShellCase(word))
                raw = raw[3:]
            elif case is None:
                return raw
            elif raw[0] == "esac":
                self._cases.pop()
                raw = raw[1:]
            elif raw == [";;"]:
                case.patterns = []
                return []
            elif case.patterns is None:
                return raw if all(outer.active for outer in self._cases) else []
            else:
                raw = case.opened(raw)
        return []

    def _expanded(self, word: str, split: bool = True) -> list[str]:
        """Return the words that one raw word becomes."""
        if found := re.fullmatch(r"\"?\$\{(\w+)\[[@*]\]\}\"?", word):
            items = self.variables.get(found[1], [])
            return items if isinstance(items, list) else items.split()
        text = PIECE.sub(self._piece, word)
        whole = re.fullmatch(r"\$\{?\w+\}?|\$[@*]", word)
        return (
            text.split()
            if split and whole and not text.startswith("$")
            else [text]
            if text or not whole
            else []
        )

    def _piece(self, found: re.Match[str]) -> str:
        if found["single"] is not None:
            return found["single"][1:-1]
        if found["double"] is not None:
            inner = found["double"][1:-1]
            return QUOTED.sub(lambda m: m[1].strip("\n") if m[1] else self._reference(m[2]), inner)
        return (
            found["escaped"]
            if found["escaped"] is not None
            else self._reference(found["reference"])
        )

    def _reference(self, text: str) -> str:
        """Return the value of ``$X``, ``${X:-default}`` or ``$((1 + X))``; what has none stays."""
        if text.startswith("$(("):
            inner = re.sub(
                r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: self._value(m[1]) or m[0], text[3:-2]
            )
            return calculated(inner) or text
        if text.startswith("$("):
            return printed(self._value_of(text[2:-1])) or text
        if text[1:] in ("@", "*"):
            return ""
        found = re.fullmatch(
            r"\$\{?([A-Za-z_]\w*|\d)(?:(:?[-=+])(.*)|(\[[@*\d]\])|([%#/^,].*))?\}?", text, re.S
        )
        if found is None:
            return text
        name, act, rest = found[1], found[2] or "", (found[3] or "").removesuffix("}")
        value = self._value(name)
        if value or (act and not act.startswith(":") and name in self.variables):
            return value
        if act and act[-1] in "-=":
            value = " ".join(self._expanded(rest, split=False))
            if act[-1] == "=":
                self.variables[name] = value
            return value
        return "" if name in self.variables or act else "${" + name + "}"

    def _value_of(self, command: str) -> str:
        """Return the text of a command with its variables filled in."""
        return QUOTED.sub(lambda m: m[0] if m[1] else self._reference(m[2]), command)

    def _value(self, name: str) -> str:
        """Return a variable of the script, or else of the environment unless it is a secret.

        A name that the environment has counts more than a plain default of the script only where
        the script says so, as ``${X:-default}`` does."""
        value = self.variables.get(name, "" if SECRET.search(name) else os.environ.get(name, ""))
        return " ".join(value) if isinstance(value, list) else value


def printed(command: str) -> str:
    """Return what pwd, date, dirname, basename, expr, realpath and ``cd PATH && pwd`` print, or an
    empty text."""
    try:
        words = shlex.split(command)
    except ValueError:
        return ""
    match words:
        case ["pwd"]:
            return str(Path.cwd())
        case ["date", form] if form.startswith("+"):
            return time.strftime(form[1:])
        case ["dirname", path]:
            return str(Path(path).parent)
        case ["basename", path]:
            return Path(path).name
        case ["expr", *sum]:
            return calculated(" ".join(sum))
        case ["realpath", path] | ["cd", path, "&&", "pwd"] if "$" not in path:
            return str(Path(path).resolve())
    return ""


def _closes(word: str) -> bool:
    """Whether a word ends with the bracket that ends an array."""
    bare = re.sub(r"\$\(+[^()]*\)+", "", word).rstrip()
    return bare.endswith(")") and bare.count(")") > bare.count("(")


def _statements(text: str) -> Iterator[list[str]]:
    """The raw words of each statement. Arrays may span lines."""
    words: list[str] = []
    in_array = False
    for found in TOKEN.finditer(text):
        if found["word"] is not None:
            word = found["word"]
            in_array = in_array or bool(re.match(r"\w+\+?=\(", word))
            words.append(word)
            opened = re.sub(r"^\w+\+?=\(", "", word)
            in_array = in_array and not _closes(opened)
        elif found["end"] and not in_array:
            if words:
                yield words
            words = []
            if found["end"] == ";;":  # ends a branch of a case
                yield [";;"]
    if words:
        yield words


_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.floordiv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}  # fmt: skip


def calculated(text: str) -> str:
    """Return the value of whole-number arithmetic, or an empty text."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Pow) and (right > 64 or abs(left) > 1 << 20):
                raise ValueError("too large")
            return _OPERATORS[type(node.op)](left, right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError("no arithmetic")

    try:
        return str(value(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return ""
