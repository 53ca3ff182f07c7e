"""The text of ``--help``: one section per group, one line per component of a registry."""

from __future__ import annotations

import argparse
import functools
import inspect
import re
import shutil
import textwrap
from typing import Any

from openrl.flags.schema import REQUIRED, FlagSpec
from openrl.flags.values import placeholder, show, without_none

WIDEST = 120  # longer lines are hard to read, however wide the terminal
EPILOG = (
    "Values come from the defaults, then from a preset, then from --config files, left to right,"
    " then from the command line. A switch is --x, --no_x, --x true or --x false; --x None unsets"
    " a flag whose default is None."
)


def help_text(prog: str, description: str, specs: list[FlagSpec]) -> str:
    """Return the help, as wide as the terminal ($COLUMNS if set)."""
    width = min(shutil.get_terminal_size().columns, WIDEST) - 1
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [--config FILE.yaml] [--flag value ...]",
        description=textwrap.fill(description.replace("``", ""), width),
        epilog=textwrap.fill(EPILOG, width),
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=32, width=width
        ),
        add_help=False,
    )
    sections: dict[str, argparse._ArgumentGroup] = {}
    for spec in specs:
        if spec.section not in sections:
            sections[spec.section] = parser.add_argument_group(spec.section)
        add_flag(sections[spec.section], spec)
        if spec.registry:
            parser.add_argument_group(f"Choices of --{spec.name}", _components(spec, width))
    return parser.format_help()


def add_flag(section: argparse._ActionsContainer, spec: FlagSpec) -> argparse.Action:
    """Add a flag as ``--help`` shows it. argparse only lays it out; ``parser.load`` reads it."""
    default = default_text(spec)
    notes = [default if spec.default is REQUIRED else f"default: {default}"]
    if spec.bounds:
        notes.insert(0, spec.bounds)
    if spec.alias:
        notes.append("also " + ", ".join(f"--{name}" for name in spec.alias))
    notes += [f"--{name} for {value}" for name, value in spec.shorthands.items()]
    metavar = placeholder(spec.type)
    form: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
    off = [] if metavar or spec.default is False else [f"--no_{spec.name}"]
    text = f"{spec.help} ({'; '.join(notes)})".replace("%", "%%")
    return section.add_argument(f"--{spec.name}", *off, help=text, **form)


def default_text(spec: FlagSpec) -> str:
    """Return the default as one would type it; "on" or "off" of a switch, or "required"."""
    if spec.default is REQUIRED:
        return "required"
    if without_none(spec.type) is bool and spec.default is not None:
        return "on" if spec.default else "off"
    if isinstance(spec.default, str) and spec.default.isprintable():
        return spec.default
    return show(spec.default)


def _components(spec: FlagSpec, width: int) -> str:
    """Return one line per component: its name and its summary."""
    entries = spec.registry.entries()
    column = max(len(entry.name) for entry in entries) + 2
    room = width - column - 2
    phrases = [textwrap.shorten(summary(e.component), room, placeholder=" ...") for e in entries]
    lines = [f"{e.name:<{column}}{phrase}" for e, phrase in zip(entries, phrases, strict=True)]
    return "\n".join(map(str.rstrip, lines))


def summary(component: Any) -> str:
    """Return the first phrase of the docstring, without links. For an object it is the docstring of
    the first function given to it."""
    if inspect.isroutine(component) or inspect.isclass(component):
        functions = [component]
    else:
        own = {
            name: value
            for name, value in vars(component).items()
            if value is not getattr(type(component), name, 0)
        }
        functions = list(filter(inspect.isroutine, own.values()))
    text = next((" ".join(f.__doc__.split()) for f in functions if f.__doc__), "")
    return re.split(r"[,;:]? *\(?https?://|[.;] |\.$", text, maxsplit=1)[0]
