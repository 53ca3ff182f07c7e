"""The YAML file of an imported configuration, with what happened to every key; and what is known of
one key or flag."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from openrl.config.importing.convert import Line, summary
from openrl.config.importing.tables import VERDICTS, KeyRow, keys_of
from openrl.config.importing.values import SECRET
from openrl.errors import Note, UserError, listed, short
from openrl.extension_points import config_tables
from openrl.flags.dump import yaml_line


def page(system: str, command: str, lines: Iterable[Line], problems: Iterable[UserError]) -> str:
    """Return a file that --config of ``command`` reads."""
    lines = list(lines)
    text = [
        f"# {summary(system, lines)}",
        f"# python -m openrl.cli.{command} --config THIS_FILE --dry_run",
        "",
    ]
    text += [_given(line) for line in lines if line.flag and not line.is_default]
    for title, those in (
        (
            f"defaults of {system} that are others here",
            [x for x in lines if x.flag and x.is_default],
        ),
        ("nothing to give", [x for x in lines if not x.flag and x.verdict not in ("none", "dead")]),
        (VERDICTS["none"], [x for x in lines if not x.flag and x.verdict == "none"]),
        (VERDICTS["dead"], [x for x in lines if not x.flag and x.verdict == "dead"]),
    ):
        if those:
            text += ["", f"# --- {title} ---"]
            text += [_given(x) if x.flag else _left_out(x) for x in those]
    problems = list(problems)
    if notes := [p for p in problems if isinstance(p, Note)]:
        text += ["", "# --- defaults that were others in earlier versions ---"]
        text += [f"# {note.message}" for note in notes]
    if fatal := [p for p in problems if p.fatal]:
        text += ["", "# --- not read ---"]
        text += [f"# {p.message}" + (f"; try {p.remedy}" if p.remedy else "") for p in fatal]
    return "\n".join(text) + "\n"


def _given(line: Line) -> str:
    how = "taken over" if line.verdict == "same" else VERDICTS[line.verdict]
    note = f": {line.note}" if line.note else ""
    keys = " and ".join(line.keys)
    source = f"{how}, default of {keys}" if line.is_default else f"{how}, {keys}{_was(line)}"
    value = True if line.secret else line.value
    return f"{yaml_line(line.flag, value)}  # {source}{note}"


def _left_out(line: Line) -> str:
    return f"# {', '.join(line.keys)}{_was(line)}: {line.note or VERDICTS[line.verdict]}"


def _was(line: Line) -> str:
    """The value as it was written, where it is another now."""
    raw = line.written.raw
    same = line.flag and str(raw).lower() == str(line.value).lower()
    if len(line.keys) > 1 or same or raw is None or line.secret or SECRET.search(line.keys[0]):
        return ""
    readable = isinstance(raw, str) and len(raw) < 60 and raw.isprintable()
    return f" = {raw if readable else short(raw)}"


def explain(name: str) -> list[str]:
    """Return what is known of a key of another system, or of all keys that lead to a flag of ours.

    Raises UserError for a name that nobody has."""
    name = name.strip().lstrip("-").partition("=")[0]
    found = [f"{system}: {text}" for system, row in _rows(name) for text in _explained(row)]
    if not found:
        near = [
            f"{k} ({e.name})"
            for e in config_tables.entries()
            if (k := keys_of(e.name).nearest(name))
        ]
        raise UserError(f"{name}: neither a key of another system nor a flag", listed(near))
    return found


def _rows(name: str) -> Iterator[tuple[str, KeyRow]]:
    for entry in config_tables.entries():
        keys = keys_of(entry.name)
        if row := keys.row(name):
            yield entry.name, row
            continue
        for row in keys.rows:
            flags = {flag for choice in row.flags for flag in choice.split("|")}
            if name in flags or row.key.endswith(f".{name}"):
                yield entry.name, row


def _explained(row: KeyRow) -> Iterator[str]:
    flags = " and ".join("--" + flag.replace("|", " or --") for flag in row.flags)
    here = f" -> {flags}" if flags else ""
    values = f" ({row.how.replace('=', ' -> ')})" if "=" in row.how else ""
    default = f"; default there {row.default}" if row.default else ""
    yield f"{row.key}{here}: {VERDICTS[row.verdict]}{values}{default}. {row.note}".strip()
