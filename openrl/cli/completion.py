"""``python -m openrl.cli.completion SHELL``: a script with which bash, zsh or tcsh complete the
commands of ``openrl``, their flags and the choices of flags."""

from __future__ import annotations

import argparse
import re
import sys
import typing
from collections.abc import Sequence

from openrl.cli import import_config, metrics, report, trace
from openrl.cli.main import COMMANDS as WORDS
from openrl.cli.printing import printing, words_parser
from openrl.config.commands import COMMANDS
from openrl.flags.help import add_flag
from openrl.flags.parser import GENERAL
from openrl.flags.schema import FlagSpec, collect_flags
from openrl.flags.values import without_none
from openrl.tracking.metric_rows import metric_rows

EXAMPLES = """
examples:
  openrl completion bash > ~/.local/share/bash-completion/completions/openrl
  openrl completion zsh > ~/.zfunc/_openrl       # a directory of $fpath
"""
SHELLS = ("bash", "zsh", "tcsh")


@printing("completion")
def main(argv: Sequence[str]) -> int:
    """Return the exit code."""
    import shtab

    shell = parser().parse_args(argv).shell
    print(shtab.complete(everything(), shell))
    return 0


def parser() -> argparse.ArgumentParser:
    what = "Print a script that completes openrl's commands and flags in a shell."
    found = words_parser("completion", what, EXAMPLES)
    found.add_argument("shell", choices=SHELLS)
    return found


def everything() -> argparse.ArgumentParser:
    """Return all commands as one parser, which is never asked to parse."""
    found = argparse.ArgumentParser(prog="openrl")
    commands = found.add_subparsers()
    own = {
        "report": report.parser(),
        "trace": trace.parser(),
        "import_config": import_config.parser(),
        "completion": parser(),
        "metrics": metrics.parser([row.name for row in metric_rows()]),
    }
    for word, (module, what) in WORDS.items():
        if module in COMMANDS:
            command = commands.add_parser(word, help=what, add_help=False)
            for spec in [*collect_flags(COMMANDS[module]), *GENERAL]:
                complete_flag(command, spec)
        else:
            commands.add_parser(word, help=what, parents=[own[word]], conflict_handler="resolve")
    return found


def complete_flag(command: argparse.ArgumentParser, spec: FlagSpec) -> None:
    """Add a flag with its choices or, if it takes a text, with the names of files."""
    import shtab

    action = add_flag(command, spec)
    action.help = re.split(r"[.;:] ", spec.help.rstrip("."))[0].replace("%", "%%")
    inner = without_none(spec.type)
    if spec.registry:
        action.choices = spec.registry.names()
    elif typing.get_origin(inner) is typing.Literal:
        action.choices = [str(choice) for choice in typing.get_args(inner)]
    elif inner is str or spec.name == "config":
        action.complete = shtab.FILE  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
