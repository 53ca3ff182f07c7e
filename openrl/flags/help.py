"""The text of ``--help``: one section per group, one line per component of a registry."""

from __future__ import annotations

import argparse
import functools
import inspect
import shutil
import textwrap
from typing import Any

from openrl.flags.schema import REQUIRED, FlagSpec
from openrl.flags.values import placeholder, show, without_none

WIDEST = 120  # longer lines are hard to read, however wide the terminal
EPILOG = (
    "Values come from the defaults, then --config files from left to right, then the command line. "
    "Switches: --x, --no_x, --x true, --x false."
)


def help_text(prog: str, description: str, specs: list[FlagSpec]) -> str:
    """As wide as the terminal ($COLUMNS where that is set)."""
    width = min(shutil.get_terminal_size().columns, WIDEST) - 1
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [--config FILE.yaml] [--flag value ...]",
        description=textwrap.fill(description, width),
        epilog=textwrap.fill(EPILOG, width),
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=32, width=width),
        add_help=False,
    )
    sections: dict[str, argparse._ArgumentGroup] = {}
    for spec in specs:
        if spec.section not in sections:
            sections[spec.section] = parser.add_argument_group(spec.section)
        _add(sections[spec.section], spec)
        if spec.registry:
            parser.add_argument_group(f"Choices of --{spec.name}", _components(spec, width))
    return parser.format_help()


def _add(section: argparse._ArgumentGroup, spec: FlagSpec) -> None:
    notes = ["required" if spec.default is REQUIRED else f"default: {_default(spec)}"]
    if spec.bounds:
        notes.insert(0, spec.bounds)
    if spec.alias:
        notes.append("also " + ", ".join(f"--{name}" for name in spec.alias))
    metavar = placeholder(spec.type)
    form: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
    section.add_argument(f"--{spec.name}", help=f"{spec.help} ({'; '.join(notes)})".replace("%", "%%"), **form)


def _default(spec: FlagSpec) -> str:
    if without_none(spec.type) is bool and spec.default is not None:
        return "on" if spec.default else "off"
    return spec.default if isinstance(spec.default, str) and spec.default.isprintable() else show(spec.default)


def _components(spec: FlagSpec, width: int) -> str:
    """One line per component: its name and the first line of its docstring."""
    entries = spec.registry.entries()
    column = max(len(entry.name) for entry in entries) + 2
    lines = []
    for entry in entries:
        first = (inspect.getdoc(entry.component) or "").partition("\n")[0]
        line = f"{entry.name:<{column}}{first}"
        lines.append(line if len(line) < width - 4 else line[: width - 7].rstrip() + "...")
    return "\n".join(lines)
