"""The sources of flags: the words of a command line and the keys of YAML files, both kept as text.

YAML is read as text too, so that the flag's type, and not a guess of YAML's, decides what ``1e-6``,
``no`` and ``007`` mean. Every setting remembers where it was written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from openrl.errors import UserError
from openrl.files import read_text
from openrl.flags.checks import problem, warning
from openrl.flags.values import Quoted

LONG_DASHES = "\u2013\u2014"  # what word processors and chats make of two dashes

PROGRAMS = (".sh", ".bash", ".py", ".ipynb")


@dataclass(frozen=True)
class Setting:
    """One value that the user wrote. ``raw`` is a list of words from the command line; from a file
    it is text, None, a list or a dict."""

    name: str  # as written: may be an alias, a no_ form or unknown
    raw: Any
    file: str = ""  # empty: the command line
    line: int = 0

    @property
    def where(self) -> str:
        """The place, for messages: " (run.yaml, line 3)"; empty for the command line."""
        return f" ({self.file}, line {self.line})" if self.file else ""


# Takes a command, its flags and what the user wrote; returns the settings with what stands in the
# form of another system replaced, and problems.
Translator = Callable[
    [type, Sequence[Any], Sequence[Setting]], tuple[list[Setting], list[UserError]]
]
TRANSLATORS: list[Translator] = []


def scan(argv: Iterable[str]) -> tuple[list[Setting], list[UserError]]:
    """Return the settings of a command line, and problems such as stray words.

    A word of dashes and a letter begins a flag, and the words up to the next one are its values;
    ``--flag=value`` holds one value of any form. This needs no list of flags, so --plugin can be
    read before the flags that plugins bring.
    """
    settings: list[Setting] = []
    problems: list[UserError] = []
    for word in argv:
        if re.match(rf"(--?|[{LONG_DASHES}])[A-Za-z]", word) and word not in ("-inf", "-nan"):
            name, equals, value = word.lstrip(f"-{LONG_DASHES}").partition("=")
            settings.append(Setting(name, [value] if equals else []))
            if not word.startswith("--"):
                fix = f"--{name}, or --flag={word} if it is a value"
                problems.append(problem((), f"{word!r}: a flag begins with two dashes", fix))
        elif settings:
            settings[-1].raw.append(word)
        else:
            fix = "write --flag value, or --flag=value where the value begins with --"
            problems.append(problem((), f"{word!r} stands before any flag", fix))
    return settings, problems


def read_file(path: str) -> tuple[list[Setting], list[UserError]]:
    """Return the settings of one YAML file of ``flag: value`` lines, and its problems."""
    if path.endswith(PROGRAMS):
        message = f"{path} is a program, which --config does not read"
        fix = f"python -m openrl.cli.import_config {path} -o config.yaml"
        return [], [problem(("config",), message, fix)]
    try:
        text = read_text("/dev/stdin" if path == "-" else path)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        return [], [problem(("config",), f"cannot read {path}: {reason}")]
    except yaml.YAMLError as error:
        return [], [problem(("config",), f"{path} is not YAML: {_in_one_line(error)}")]
    except RecursionError:
        return [], [problem(("config",), f"{path} has values that are nested too deeply")]
    if root is None:
        return [], [warning(("config",), f"{path} holds no flags")]
    if not isinstance(root, yaml.MappingNode):
        return [], [problem(("config",), f"{path} holds no  flag: value  lines")]
    problems = [
        problem(("config",), f"{path}, line {key.start_mark.line + 1}: the key is not text")
        for key, _ in root.value
        if not isinstance(key, yaml.ScalarNode)
    ]
    try:
        settings = [
            Setting(key.value, _plain(value), path, key.start_mark.line + 1)
            for key, value in root.value
            if isinstance(key, yaml.ScalarNode)
        ]
    except RecursionError:
        return [], [problem(("config",), f"{path} holds a value that contains itself")]
    lines: dict[str, int] = {}
    for s in settings:
        if s.name in lines:
            problems.append(
                problem((s.name,), f"given twice in {path}, lines {lines[s.name]} and {s.line}")
            )
        lines[s.name] = s.line
    return settings, problems


def _plain(node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _plain(value) for key, value in node.value}
    if node.style:  # quotes or a block: always text, whatever it looks like
        return Quoted(node.value)
    return None if node.tag == "tag:yaml.org,2002:null" else node.value


def from_yaml(text: str) -> Any:
    """Return the value of one YAML expression, whose scalars stay text. Raises UserError."""
    try:
        return _plain(yaml.compose(text, Loader=yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError, AttributeError) as error:
        raise UserError(f"{text[:60]!r} is not YAML") from error


class _NothingTwice(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        named = (key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge")
        keys = [self.construct_object(key, deep=True) for key in named]
        if twice := next((key for n, key in enumerate(keys) if key in keys[:n]), None):
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} is there twice")
        return super().construct_mapping(node, deep)


def read_table(path: str, flag: str) -> Any:
    """Return the content of a YAML or JSON file. Raises UserError, which names ``flag``."""
    try:
        return yaml.load(read_text(path), _NothingTwice)
    except RecursionError:
        reason = "its values are nested too deeply"
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, yaml.YAMLError) as error:
        reason = _in_one_line(error)
    raise UserError(f"--{flag}: cannot read {path}: {reason}")


def _in_one_line(error: Exception) -> str:
    """Return the message of an error of YAML without the name that it makes up for the file."""
    return " ".join(str(error).replace('in "<unicode string>",', "at").split())
