"""``python -m openrl.cli.import_config FILE_OR_COMMAND``: another system's configuration as a file
for --config, with a comment on every key. Nothing of it is run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import openrl.config.rules.all  # noqa: F401
from openrl.cli.printing import printing, words_parser
from openrl.config.commands import COMMANDS
from openrl.config.importing.convert import Conversion, differing, lost, summary
from openrl.config.importing.page import explain, page
from openrl.config.importing.reading import MAIN, read, recognise
from openrl.errors import UserError, printable
from openrl.files import write_atomically
from openrl.flags.checks import report
from openrl.flags.schema import collect_flags

PROG = "import_config"


@printing(PROG)
def main(argv: Sequence[str]) -> int:
    """Return the exit code: 0 done, 2 something cannot be read or has no value."""
    args = parser().parse_args(argv)
    if args.explain:
        print(printable("\n".join(explain(args.explain))))
        return 0
    if args.source is None:
        parser().error("a file or a command is required")
    return _import(args.source, args.system, args.output)


def parser() -> argparse.ArgumentParser:
    found = words_parser(PROG, str(__doc__))
    found.add_argument(
        "source",
        nargs="?",
        help="a YAML file, a script, a Python file, a notebook, or a command line in quotes",
    )
    found.add_argument("--from", dest="system", default="", help="the system, if it cannot be told")
    found.add_argument("-o", "--output", help="the file to write; without it the screen")
    found.add_argument(
        "--explain", metavar="KEY", help="what becomes of a key, or which keys lead to a flag"
    )
    return found


def _import(argument: str, system: str, output: str | None) -> int:
    source = read(argument)
    known = recognise(source, system)
    command = known.command or MAIN
    specs = collect_flags(COMMANDS[command])
    lines, problems = Conversion(known.system, command, specs, known.values).run()
    problems = [*source.problems, *problems]
    fatal = any(p.fatal for p in problems)
    text = page(known.system, command, lines, problems)
    if output:
        try:
            write_atomically(Path(output), text)
        except OSError as error:
            raise UserError(f"cannot write {output}: {error.strerror}") from error
        print(printable(f"{output}: {summary(known.system, lines)}"))
        if not fatal:
            print(f"next: python -m openrl.cli.{command} --config {output} --dry_run")
    else:
        print(printable(text), end="")
    for what, those in (("no counterpart", lost(lines)), ("another meaning", differing(lines))):
        if those and output:
            print(printable(f"{PROG}: {what}: {those}"), file=sys.stderr)
    written = f"{output or 'the file above'} has all the other keys"
    report(PROG, problems, outcome=written)
    return 2 if fatal else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
