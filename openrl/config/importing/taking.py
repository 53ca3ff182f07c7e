"""Files and flags of other systems among those of a command: they become flags of ours before
anything reads them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from openrl.config.commands import COMMANDS
from openrl.config.importing.convert import Conversion, Line, differing, lost, summary
from openrl.config.importing.reading import from_settings, known_keys, recognise
from openrl.config.importing.tables import keys_of
from openrl.config.importing.values import Written
from openrl.errors import Note, UserError
from openrl.extension_points import config_tables
from openrl.flags.checks import problem, warning
from openrl.flags.schema import FlagSpec
from openrl.flags.sources import TRANSLATORS, Setting
from openrl.flags.values import is_mapping, show


def take_over(
    command: type, specs: Sequence[FlagSpec], settings: Sequence[Setting]
) -> tuple[list[Setting], list[UserError]]:
    """Return the settings of a command in our own words, and what was found on the way."""
    known_flags = {n: s for s in specs for n in (s.name, *s.alias, *s.shorthands)}
    name = next((name for name, config in COMMANDS.items() if config is command), "")
    if not name:
        return list(settings), []
    taken: list[Setting] = []
    problems: list[UserError] = []
    for file, group in groupby(settings, key=lambda s: s.file):
        written = list(group)
        if not file:
            found, wrong = _flags(name, specs, written, known_flags)
        elif _is_foreign(written, known_flags):
            found, wrong = _file(name, specs, written)
        else:
            found, wrong = written, []
        taken += found
        problems += wrong
    return taken, problems


TRANSLATORS.append(take_over)


def _is_foreign(settings: Sequence[Setting], known_flags: dict[str, FlagSpec]) -> bool:
    """Whether a file is of another system: one that knows more of its keys than we do."""
    strange = [
        s
        for s in settings
        if s.name not in known_flags
        or (isinstance(s.raw, dict) and not is_mapping(known_flags[s.name].type))
    ]
    nested = any(isinstance(s.raw, dict) for s in strange)
    if nested and not any(s.name in known_flags for s in settings):
        return True  # flags of ours are not nested
    own = 0 if nested else len(settings) - len(strange)
    return bool(strange) and max(known_keys(from_settings(settings)).values()) > own


def _file(
    command: str, specs: Sequence[FlagSpec], settings: list[Setting]
) -> tuple[list[Setting], list[UserError]]:
    file = settings[0].file
    source = from_settings(settings)
    try:
        known = recognise(source)
        if known.command not in ("", command):
            raise UserError(
                f"{known.system}'s configuration of what {known.command} does",
                f"python -m openrl.cli.{known.command} --config {file}",
            )
    except UserError as error:
        return [], [problem(("config",), f"{file}: {error.message}", error.remedy)]
    lines, wrong = Conversion(known.system, command, specs, known.values).run()
    more = f"each of them: python -m openrl.cli.import_config {file}"
    problems = [*source.problems, *wrong, Note(f"{file}: {summary(known.system, lines)}", more)]
    for what, those in (
        ("without counterpart", lost(lines)),
        ("of another meaning", differing(lines)),
    ):
        if those:
            problems.append(warning((), f"{file}: {what}: {those}"))
    return [Setting(x.flag, _raw(x), file, _number(x.written)) for x in lines if x.flag], problems


def _flags(
    command: str,
    specs: Sequence[FlagSpec],
    settings: list[Setting],
    known_flags: dict[str, FlagSpec],
) -> tuple[list[Setting], list[UserError]]:
    """Take over those flags of a command line that systems write with dots."""
    values: dict[str, dict[str, Written]] = {}
    for s in settings:
        for entry in config_tables.entries():
            dotted = entry.component.as_flags and "." in s.name
            if dotted and s.name not in known_flags and keys_of(entry.name).row(s.name):
                raw = s.raw[0] if len(s.raw) == 1 else s.raw or "true"
                values.setdefault(entry.name, {})[s.name] = Written(raw)
    kept, problems = list(settings), []
    for system, those in values.items():
        lines, wrong = Conversion(system, command, specs, those).run(defaults=False)
        kept = [s for s in kept if s.name not in those]
        kept += [Setting(x.flag, _words(x)) for x in lines if x.flag]
        problems += [*wrong, Note(f"read {summary(system, lines)}")]
        if left := lost(lines):
            problems.append(warning((), f"without counterpart: {left}"))
    return kept, problems


def _raw(line: Line) -> Any:
    return list(line.value) if isinstance(line.value, tuple) else line.value


def _words(line: Line) -> list[str]:
    """Return the words of a value on a command line."""
    if isinstance(line.value, tuple):
        return [str(item) for item in line.value]
    return [line.value if isinstance(line.value, str) else show(line.value)]


def _number(written: Written) -> int:
    """Return the number of the line that a value stands in."""
    return int(written.where.rpartition(" ")[2].rstrip(")")) if written.where else 0
