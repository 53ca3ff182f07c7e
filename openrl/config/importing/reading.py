"""What is in a file or a command line of another system: whose keys, for which command here."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from openrl.config.importing.shell import Script
from openrl.config.importing.tables import ConfigTable, keys_of
from openrl.config.importing.values import Written, flat, merged, put, references, resolve
from openrl.errors import UserError, listed
from openrl.extension_points import config_tables
from openrl.files import read_text
from openrl.flags.checks import warning
from openrl.flags.sources import Setting, from_yaml, read_file

MAIN = "train_ppo_ray"
FILES = ("config", "config_path", "config_name", "config-path", "config-name", "config_file")
"""Words of a command line that name a file of keys."""


@dataclass
class NestedKeys:
    """The keys of one file or command line, nested as there."""

    tree: dict[str, Any]
    words: tuple[str, ...] = ()  # of the command line: what it runs
    where: dict[str, str] = field(default_factory=dict)  # first part of a key -> its place
    problems: list[UserError] = field(default_factory=list)


@dataclass(frozen=True)
class Recognised:
    system: str
    command: str  # its name here; empty: nothing tells
    values: dict[str, Written]


def recognise(source: NestedKeys, chosen: str = "") -> Recognised:
    """Return whose keys these are. Raises UserError if nobody's, naming what was recognised."""
    tree = resolve(source.tree)
    counts = known_keys(source)
    by_words = [
        e.name for e in config_tables.entries() if _mark(e.component, source.words) is not None
    ]
    if chosen:
        names = {name.lower(): name for name in counts}
        if chosen.lower() not in names:
            raise UserError(f"--from {chosen}: no such system", f"one of {', '.join(counts)}")
        system = names[chosen.lower()]
    else:
        # of systems that share keys, the one that knows most of them; of two programs likewise
        system = max(by_words or counts, key=lambda name: counts[name], default="")
        total = sum(key.split(".")[0] not in references(source.tree) for key in flat("", tree))
        if not by_words and (not system or counts[system] * 2 <= total):
            some = [f"{n} of {total} keys are {name}'s" for name, n in counts.items() if n]
            raise UserError(
                f"a configuration of no known system: {listed(some) or 'no key is known'}",
                "python -m openrl.cli.import_config FILE --from SYSTEM, which is one of"
                f" {', '.join(counts)}",
            )
    table, keys = config_tables[system].component, keys_of(system)
    tree = {
        name if table.renamed.get(name, name) in tree else table.renamed[name]: value
        for name, value in tree.items()
    }
    variables = references(source.tree)
    values = {
        key: written
        for name, value in tree.items()
        for key, written in flat(name, value, source.where.get(name, ""), keys).items()
        if keys.row(key) or (name not in variables and written.raw != {})
    }
    mark = _mark(table, (*source.words, *values))
    if mark and not table.marks[mark]:
        raise UserError(f"{system}'s {mark} has no counterpart", table.refused.get(mark, ""))
    implied = {key: Written(value) for key, value in table.implied.get(mark or "", {}).items()}
    return Recognised(system, table.marks[mark] if mark else "", implied | values)


def known_keys(source: NestedKeys) -> dict[str, int]:
    """Return how many of the keys each system knows."""
    tables = {entry.name: keys_of(entry.name) for entry in config_tables.entries()}
    return {
        name: sum(keys.row(key) is not None for key in flat("", source.tree, "", keys))
        for name, keys in tables.items()
    }


def _mark(table: ConfigTable, words: Iterable[str]) -> str | None:
    """Return the first mark of a table among words; a mark that ends with a dot begins a word, and
    "a+b" is both."""
    words = list(words)

    def found(part: str) -> bool:
        return part in words or (part.endswith(".") and any(w.startswith(part) for w in words))

    return next((mark for mark in table.marks if all(map(found, mark.split("+")))), None)


# -- files -----------------------------------------------------------------------------------------


def from_settings(settings: Sequence[Setting]) -> NestedKeys:
    """Return the keys of one YAML file. What its defaults list names comes first."""
    file = settings[0].file if settings else ""
    source = NestedKeys({s.name: s.raw for s in settings if s.name != "defaults"})
    source.where = {s.name: s.where for s in settings}
    for setting in settings:
        if setting.name == "defaults" and isinstance(setting.raw, list):
            for below in _defaults(setting.raw, Path(file).parent, source.problems):
                source.tree = merged(below, source.tree)
    return source


def _defaults(entries: list[Any], home: Path, problems: list[UserError]) -> list[dict[str, Any]]:
    """Return the files of a defaults list, the last first."""
    found = []
    for entry in entries:
        if isinstance(entry, Mapping):
            continue  # a group of files; those of models say what a model's own config.json says
        name, _, _ = str(entry).partition("@")
        path = home / f"{name.removesuffix('.yaml')}.yaml"
        if name == "_self_" or not path.is_file():
            if name != "_self_":
                problems.append(warning((), f"{entry} of the defaults is not at {path}: not read"))
            continue
        settings, wrong = read_file(str(path))
        problems += wrong
        found.append(from_settings(settings).tree)
    return found[::-1]


# -- command lines and scripts ---------------------------------------------------------------------


def from_script(text: str, path: Path, arguments: Sequence[str] = ()) -> NestedKeys:
    """Return the keys of the command in a script that runs a known program, the first that trains.
    Of a program that nobody knows the keys tell whose it is."""
    script = Script(text, path, arguments)
    marks = {
        mark: command
        for entry in config_tables.entries()
        for mark, command in entry.component.marks.items()
        if not mark.endswith(".")
    }
    commands = [_split(_unwrapped(words, marks), marks) for words in script.commands]
    known = [c for c in commands if c.program in marks]
    known.sort(key=lambda c: not marks[c.program].startswith("train_"))
    if known:
        systems = [e.name for e in config_tables.entries() if known[0].program in e.component.marks]
        source = _of_command(known[0], systems, path.parent)
        for word in dict.fromkeys(script.undecided):
            message = f"case {word} in: {word} has no value, so the last branch counts"
            source.problems.append(warning((), message, "export it before"))
        return source
    for command in (c for c in commands if c.program):
        source = _of_command(command, [e.name for e in config_tables.entries()], path.parent)
        counts = known_keys(source)
        if (most := max(counts.values())) > 4 and most * 2 > len(flat("", source.tree)):
            source.words = ()
            system = max(counts, key=lambda name: counts[name])
            unknown = f"{command.program}: a program that is not known; its keys are {system}'s"
            source.problems.append(warning((), f"{unknown}: what it does otherwise is not read"))
            return source
    programs = [command.program for command in commands if command.program]
    near = [n for program in programs for n in get_close_matches(program, marks, 3, 0.75)]
    raise UserError(
        f"no command of a known system; found {listed(programs) or 'no program'}",
        f"a script that runs one of {listed(near or sorted(marks), 12)}",
    )


@dataclass(frozen=True)
class _Command:
    program: str  # its name, or an empty text
    before: list[str]  # what starts it
    arguments: list[str]


def _split(words: list[str], marks: Mapping[str, str]) -> _Command:
    """Return a command in parts. Its program is the first known word, or else a module or file."""
    names = [Path(word).name if word.endswith(".py") else word for word in words]
    pairs = [" ".join(names[i : i + 2]) for i in range(len(names))]
    for i, name in enumerate(names):
        if found := next((n for n in (pairs[i], name) if n in marks), ""):
            return _Command(found, words[:i], words[i + 1 :])
    for i, word in enumerate(words):
        if word.endswith(".py") or (i and words[i - 1] in ("-m", "--module")):
            return _Command(word, words[:i], words[i + 1 :])
    return _Command("", words, [])


def _of_command(command: _Command, systems: Sequence[str], home: Path) -> NestedKeys:
    source = _read_given(_of_program(command.arguments, systems), command.program, home)
    above = _read_given(_of_launcher(command.before, systems), command.program, home)
    source.tree = merged(above.tree, source.tree)
    source.problems = above.problems + source.problems
    return source


def _unwrapped(words: list[str], marks: Mapping[str, str]) -> list[str]:
    """Return the words of a command, with those of the command line that one of them is: what
    bash -c or srun runs."""
    for word in words:
        if any(f"{mark} " in word for mark in marks):
            try:
                return shlex.split(word.replace("\\\n", " "), comments=True)
            except ValueError:
                continue
    return words


def _given(words: Sequence[str]) -> dict[str, Any]:
    """Return what the arguments of a program say: key=value or --key value. A list holds the words
    that follow --key."""
    given: dict[str, Any] = {}
    name = ""
    for word in words:
        assigned = re.fullmatch(r"[+~]{0,2}([\w.@/-]+)=(.*)", word, re.S)
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            given[name] = [value] if equals else []
        elif re.match("-[A-Za-z]", word):
            name = ""
        elif assigned and not given.get(name) and not name:
            given[assigned[1]] = _value(assigned[2])
        elif assigned and "." in assigned[1]:
            name, given[assigned[1]] = "", _value(assigned[2])
        elif name and (word or not given[name]):  # "$@" of no arguments is an empty word
            given[name].append(word)
    return given


def _of_program(words: Sequence[str], systems: Iterable[str]) -> dict[str, Any]:
    """Return what a program is given, with --no_x as x, which is false, where it is read so."""
    given = _given(words)
    for system in systems:
        keys, negation = keys_of(system), config_tables[system].component.negation
        for name in [name for name in given if negation and name.startswith(negation)]:
            if keys.row(name) is None and keys.row(name.removeprefix(negation)):
                del given[name]
                given[name.removeprefix(negation)] = "false"
    return given


def _of_launcher(words: Sequence[str], systems: Iterable[str]) -> dict[str, Any]:
    """Return what torchrun or accelerate launch are given for a program, by the names of the
    system's keys."""
    keys = {k: v for name in systems for k, v in config_tables[name].component.launcher.items()}
    given = {name.replace("-", "_"): value for name, value in _given(words).items()}
    return {keys[name]: value for name, value in given.items() if name in keys}


def _read_given(given: Mapping[str, Any], program: str, home: Path) -> NestedKeys:
    """Return the keys that arguments give, over those of the files that they name."""
    source = NestedKeys({}, (program,))
    files: dict[str, str] = {}
    tree: dict[str, Any] = {}
    for key, value in given.items():
        flag = value[0] if isinstance(value, list) and len(value) == 1 else value
        raw = "true" if value == [] else flag
        if key in FILES:
            files[key.replace("-", "_")] = str(raw)
        elif not key.startswith("hydra"):
            put(tree, key, raw)
    for path in _named_files(files, home):
        settings, wrong = read_file(str(path))
        source.problems += wrong
        below = from_settings(settings)
        source.problems += below.problems
        source.tree = merged(below.tree, source.tree)
    if files and not source.tree:
        source.problems.append(
            warning((), f"{' '.join(files.values())}: no such file: the system's defaults count")
        )
    source.tree = merged(source.tree, tree)
    return source


def _value(text: str) -> Any:
    """Return the value of key=value, which is written as YAML."""
    try:
        return from_yaml(text) if text[:1] in ("[", "{", "'", '"') else text
    except UserError:
        return text


def _named_files(files: Mapping[str, str], home: Path) -> list[Path]:
    """Return those files that exist, looked for from here and from the script's directory up."""
    places = [Path(), home, *home.resolve().parents]
    names = [files[key] for key in ("config", "config_file") if key in files]
    if "config_name" in files:
        name = files["config_name"].removesuffix(".yaml") + ".yaml"
        folders = [files.get("config_path", "."), ".", "configs", "config", "examples"]
        names += [str(Path(folder, name)) for folder in folders]
    found = [
        path for name in names for path in (place / name for place in places) if path.is_file()
    ]
    return found[:1]


# -- Python ----------------------------------------------------------------------------------------


def from_python(text: str, path: Path = Path("script.py")) -> NestedKeys:
    """Return the arguments of calls such as ``SomeConfig(learning_rate=1e-6)``. Names are looked up
    among the constants of the file and the defaults of its argparse; nothing is run. If a
    file leaves its settings to a command line, the command in its docstring counts, and what the
    trainer is given beside them."""
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: not Python: {error.msg}") from error
    known = {c: p for e in config_tables.entries() for c, p in e.component.calls.items()}
    names = _constants(module)
    tree: dict[str, Any] = {}
    called = []
    for node in ast.walk(module):
        if (
            not isinstance(node, ast.Call)
            or (name := ast.unparse(node.func).rpartition(".")[2]) not in known
        ):
            continue
        called.append(name)
        if (whole := known[name].removesuffix(".")) and not node.keywords:
            put(tree, whole, "default")
        for word in node.keywords:
            if word.arg:
                put(tree, known[name] + word.arg, _constant(word.value, names))
    usage = "\n".join(
        node.value.value
        for node in module.body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
    )
    if usage and not any(known[name] == "" for name in called):
        source = from_script(usage, path)
        source.tree = merged(_with_arguments(tree, source.tree), source.tree)
        return source
    if not called:
        remedy = f"a file that calls one of {listed(sorted(known))}"
        raise UserError("no call of a known class", remedy)
    return NestedKeys(tree, tuple(called))


def _with_arguments(tree: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree in which ``${some_args.name}`` is what the command line gives as ``name``."""

    def filled(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _with_arguments(value, given)
        name = re.fullmatch(r"\$\{\w*args\.(\w+)\}", value) if isinstance(value, str) else None
        return given.get(name[1], value) if name else value

    return {key: filled(value) for key, value in tree.items()}


def _constants(module: ast.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Assign):
            for name, value in _assigned(node.targets[0], node.value):
                found.setdefault(name, value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            found.setdefault(ast.unparse(node.target), node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument"):
            flags = [a.value for a in node.args if isinstance(a, ast.Constant)]
            default = next((k.value for k in node.keywords if k.arg == "default"), None)
            if flags and default is not None:
                found.setdefault("args." + str(flags[-1]).lstrip("-").replace("-", "_"), default)
    return found


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names of ``a = 1`` or ``a, b = 1, 2`` with their values."""
    match target, value:
        case ast.Name(id=name), _:
            yield name, value
        case ((ast.Tuple() | ast.List()), (ast.Tuple() | ast.List())):
            for one, its in zip(target.elts, value.elts, strict=False):
                yield from _assigned(one, its)


def _constant(node: ast.expr, names: Mapping[str, Any], depth: int = 8) -> Any:
    """Return a value as YAML holds it; for what only running would tell, ``${expression}``."""
    try:
        return _as_text(ast.literal_eval(node))
    except (ValueError, TypeError):
        text = ast.unparse(node)
        known = names.get(text)
        return (
            _constant(known, names, depth - 1) if known is not None and depth else "${" + text + "}"
        )


def _as_text(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_text(item) for item in value]
    if isinstance(value, dict):
        return {str(k): _as_text(v) for k, v in value.items()}
    return value if value is None or isinstance(value, str) else str(value)


def cells(text: str, path: Path) -> str:
    """Return the Python of a notebook without its lines for the shell and for Jupyter."""
    try:
        found = [
            "".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError) as error:
        remedy = f"jupyter nbconvert --to script {path}"
        raise UserError(f"{path} is no notebook that can be read", remedy) from error
    return re.sub(r"(?m)^([ \t]*)[!%].*$", r"\1pass", "\n".join(found))


def read(argument: str) -> NestedKeys:
    """Return the keys of a file, or of a command line given as one text.

    Raises UserError for what is neither."""
    path = Path(argument).expanduser() if "\n" not in argument and len(argument) < 4096 else None
    if path is None or not path.is_file():
        if " " not in argument.strip():
            raise UserError(f"{argument}: no such file")
        name, *given = shlex.split(argument.removeprefix("bash ")) if "\n" not in argument else [""]
        if name.endswith(".sh") and Path(name).is_file():
            return from_script(read_text(name), Path(name), given)
        return from_script(argument, Path("command"))
    if path.suffix in (".yaml", ".yml", ".json"):
        settings, wrong = read_file(str(path))
        if any(p.fatal for p in wrong):
            raise next(p for p in wrong if p.fatal)
        source = from_settings(settings)
        source.problems += wrong
        return source
    try:
        text = read_text(str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {argument}: {error}") from error
    if path.suffix == ".ipynb":
        return from_python(cells(text, path), path)
    return from_python(text, path) if path.suffix == ".py" else from_script(text, path)
