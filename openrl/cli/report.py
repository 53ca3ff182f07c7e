"""``python -m openrl.cli.report RUN [OTHER ...]``: what happened in a run, as a page to browse."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from openrl.cli.printing import printing, words_parser
from openrl.errors import printable
from openrl.report.page import NAME, write_report
from openrl.report.serve import HOST, LiveReport, start_server

EXAMPLES = """
examples:
  python -m openrl.cli.report RUN --open            write RUN/report.html and show it
  python -m openrl.cli.report RUN OTHER             both side by side, in RUN/report.html
  python -m openrl.cli.report RUN --serve           refreshes by itself while the run goes on

docs/report.md explains the page.
"""


@printing("report", OSError)
def main(argv: Sequence[str]) -> int:
    """Return the exit code."""
    given = parser().parse_args(argv)
    directories = [path.expanduser() for path in given.runs]
    if given.serve:
        serve(directories, given.port, given.open)
    else:
        write(directories, given.output_path, given.open)
    return 0


def parser() -> argparse.ArgumentParser:
    what = "Show a run, or several side by side, in one HTML file."
    found = words_parser("report", what, EXAMPLES)
    add = found.add_argument
    add("runs", metavar="RUN", nargs="+", type=Path, help="the --save_path of a run")
    add("--output_path", type=Path, metavar="FILE", help=f"default: {NAME} in the first RUN")
    add("--open", action="store_true", help="show it in the browser")
    add("--serve", action="store_true", help="to this machine only, and with every change")
    add("--port", type=int, default=0, metavar="PORT", help="of --serve; 0 takes any free one")
    return found


def write(directories: Sequence[Path], output: Path | None, show: bool) -> None:
    path = output or directories[0] / NAME
    write_report(directories, path)
    print(printable(str(path)))
    if show:
        webbrowser.open(path.resolve().as_uri())


def serve(directories: Sequence[Path], port: int, show: bool) -> None:
    """Serve until it is interrupted."""
    report = LiveReport(directories)
    report.page()  # what is wrong with a directory is said here, not in the browser
    with start_server(report, port) as server:
        address = f"http://{HOST}:{server.server_port}/"
        print(f"{address} (ends with Ctrl-C)", flush=True)
        if show:
            webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
