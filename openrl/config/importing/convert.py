"""The keys of another system become flags of a command, each with what happened to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from openrl.config.importing.formulas import (
    Computed,
    Formulas,
    GivenKeys,
    no_value,
    rows_of,
)
from openrl.config.importing.tables import (
    LEFT_OUT,
    REFUSE,
    TOGETHER,
    VERDICTS,
    KeyRow,
    keys_of,
    plain,
)
from openrl.config.importing.values import Written, unresolved
from openrl.errors import Note, UserError, listed
from openrl.extension_points import config_tables
from openrl.flags.checks import problem
from openrl.flags.schema import REQUIRED, FlagSpec
from openrl.flags.values import BOOL_WORDS
from openrl.registry import resolve as import_name


@dataclass(frozen=True)
class Line:
    """What became of one key or several. Without a flag there is nothing to give."""

    verdict: str
    keys: tuple[str, ...]
    flag: str = ""
    value: Any = None  # of the flag, as its type has it
    note: str = ""
    written: Written = Written(None)
    is_default: bool = False  # no key was given: the value is the default there
    secret: str = ""  # the environment variable that ``value`` belongs in


Together = Callable[[GivenKeys, str], Iterator[Computed]]
"""Takes the keys of a file and the name of a command here."""


@dataclass
class Conversion:
    """Keys of a system on their way to the flags of a command."""

    system: str
    command: str  # its name
    specs: Iterable[FlagSpec]
    values: Mapping[str, Written]

    def __post_init__(self) -> None:
        self.keys = keys_of(self.system)
        self.known = {name: spec for spec in self.specs for name in (spec.name, *spec.alias)}
        self.lines: list[Line] = []
        self.problems: list[UserError] = []
        self.strange: list[str] = []  # keys that are like none of the system's

    def run(self, defaults: bool = True) -> tuple[list[Line], list[UserError]]:
        """Return a line for each key, and problems. With ``defaults`` those of the system count
        where they are not ours."""
        computed = self._computed()
        for key, written in self.values.items():
            try:
                self._take(key, written, computed)
            except UserError as error:
                error.message += "" if error.message.endswith(written.where) else written.where
                if all(p.message != error.message for p in self.problems):
                    self.problems.append(error)
        self.problems += self._strange()
        self._settle(computed, given=True)
        if defaults:
            self._settle(computed, given=False)
            self._defaults()
            self.problems += self._changed()
        return self.lines, self.problems

    def _computed(self) -> list[Computed]:
        given = GivenKeys(self.values, self.keys)
        found = [*Formulas(given).computed(rows_of(self.system), self.command)]
        if function := config_tables[self.system].component.together:
            together: Together = import_name(function)
            found += together(given, self.command)
        self.problems += given.problems.values()
        return [replace(c, flag=name) for c in found if (name := self.first_of(c.flag))]

    def _take(self, key: str, written: Written, computed: list[Computed]) -> None:
        row = self.keys.row(key)
        if row is None or not row.applies(self.command):
            if config_tables[self.system].component.as_flags and key in self.known:
                row = KeyRow(key, "same", (key,), "", "", (), 0, (), "")  # a flag with our name
            elif row is None:
                self._unknown(key)
                return
        line = Line(row.verdict, (key,), note=row.note, written=written)
        if row.how == REFUSE and not _off(written.raw, row):
            raise UserError(f"{key}: no counterpart: {row.note}", f"leave {key} out")
        if row.how == TOGETHER:
            if all(c.keys[0] != key for c in computed):
                flags = [c.flag for c in computed if key in c.keys and c.value is not None]
                self.lines.append(replace(line, note=f"see {flags[0]}" if flags else row.note))
            return
        names = [name for choice in row.flags if (name := self.first_of(choice))]
        if not names or not row.applies(self.command):
            verdict = "none" if row.flags else row.verdict
            note = row.note if not row.flags else f"{self.command} has no such flag"
            self.lines.append(replace(line, verdict=verdict, note=note))
            return
        if (what := unresolved(written.raw)) and not self.known[names[0]].secret:
            raise no_value(key, what, written)
        value = row.converted(written.raw)
        for name in names:
            self._give(name, value, line)

    def first_of(self, choice: str) -> str:
        """Return the first flag of "a|b" that the command has, or an empty text."""
        found = (self.known[name].name for name in choice.split("|") if name in self.known)
        return next(found, "")

    def _give(self, name: str, raw: Any, line: Line) -> None:
        if raw == LEFT_OUT or plain(raw) == "null":
            self.lines.append(replace(line, note=line.note or "the default here"))
            return
        spec = self.known[name]
        if spec.secret and plain(raw) not in BOOL_WORDS:
            self.lines.append(replace(line, flag=name, value=raw, secret=spec.secret))
            return
        try:
            value = spec.read(raw)
        except ValueError as error:
            raise UserError(f"{line.keys[0]}: {error}", flags=(name,)) from error
        earlier = next((x for x in self.lines if x.flag == name), None)
        if earlier is None:
            self.lines.append(replace(line, flag=name, value=value))
        elif earlier.value != value and not line.is_default:
            note = f"--{name} is one value for both, that of {earlier.keys[0]}"
            self.lines.append(replace(line, verdict="differs", note=note))
        elif not line.is_default:
            self.lines.append(replace(line, note=f"as {earlier.keys[0]}"))

    def _settle(self, computed: list[Computed], given: bool) -> None:
        """Give what several keys decide: one of them is ``given``, or else only defaults decide."""
        for c in computed:
            mine = [key for key in c.keys if key in self.values]
            if bool(mine) != given:
                continue
            where = self.values[mine[0]] if mine else Written(None)
            line = Line(c.verdict, tuple(mine) or c.keys[:1], note=c.note, written=where)
            if not mine:
                line = replace(line, is_default=True)
                if c.value is None or plain(c.value) == plain(self.known[c.flag].default):
                    continue
            if c.value is None:
                self.lines.append(line)
                continue
            try:
                self._give(c.flag, c.value, line)
            except UserError as error:
                self.problems.append(error)

    def _defaults(self) -> None:
        taken = {line.flag for line in self.lines}
        for row in self.keys.rows:
            given = row.key in self.values or not row.applies(self.command)
            if row.default_raw is None or not row.flags or row.how == TOGETHER or given:
                continue
            value = row.converted(row.default_raw)
            for name in filter(None, map(self.first_of, row.flags)):
                if name in taken or value == LEFT_OUT or plain(value) == "null":
                    continue
                spec = self.known[name]
                if spec.default is REQUIRED or spec.read(value) != spec.default:
                    line = Line(row.verdict, (row.key,), note=row.note, is_default=True)
                    self._give(name, value, line)

    def _changed(self) -> Iterator[Note]:
        """Say what is assumed of keys that are not given and had another default earlier."""
        for row in self.keys.rows:
            acts = row.applies(self.command) and any(map(self.first_of, row.flags))
            if row.changed and row.key not in self.values and acts:
                yield Note(f"{row.key} is not given and taken as {row.changed}")

    def _unknown(self, key: str) -> None:
        """Raise UserError for a key that is like one here or another system's; keep others."""
        others = [
            entry.name
            for entry in config_tables.entries()
            if entry.name != self.system and keys_of(entry.name).row(key)
        ]
        near = self.keys.nearest(key, self.values)
        if others:
            message = f"{key}: a key of {others[0]} among those of {self.system}"
            raise problem((), message, "one file for each system")
        if near:
            message = f"{key}: not a key of {self.system} that is known here"
            raise problem((), message, f"{near}, the nearest that is")
        self.strange.append(key)

    def _strange(self) -> Iterator[UserError]:
        """Yield a problem for each section with keys that are like none of the system's: a fork has
        many in one."""
        sections: dict[str, list[str]] = {}
        for key in self.strange:
            section = key.partition(".")[0] if "." in key else ""
            sections.setdefault(section, []).append(key)
        for keys in sections.values():
            if len(keys) == 1:
                where = self.values[keys[0]].where
                message = f"{keys[0]}: not a key of {self.system} that is known here{where}"
                yield problem((), message, "leave it out")
                continue
            message = f"{listed(keys, 20)}: not keys of {self.system} that are known here"
            yield problem((), message, "leave them out; what a fork does by them is not done here")


def _off(raw: Any, row: KeyRow) -> bool:
    value = plain(raw)
    return value in ("null", "false", "0", "", "[]", "{}", plain(row.default)) or raw in ([], {})


def summary(system: str, lines: Iterable[Line]) -> str:
    """Return one line that counts what became of the keys."""
    of_keys = {line.keys[0]: line.verdict for line in lines if not line.is_default}
    counts = Counter(of_keys.values())
    words = [f"{counts[verdict]} {name}" for verdict, name in VERDICTS.items() if counts[verdict]]
    return f"{len(of_keys)} keys of {system}: {', '.join(words)}"


def lost(lines: Iterable[Line]) -> str:
    """Name the keys that were given and that nothing here does."""
    return listed(
        [f"{x.keys[0]}: {x.note}" for x in lines if x.verdict == "none" and not x.flag], 6
    )


def differing(lines: Iterable[Line]) -> str:
    """Name the keys that were given and mean something else here."""
    found = [f"{x.keys[0]}: {x.note}" for x in lines if x.verdict == "differs" and not x.is_default]
    return listed(found, 6)
