"""``python -m openrl.cli.trace RUN``: every kept trajectory of a run, token by token."""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from openrl.cli.printing import printing, words_parser
from openrl.errors import listed, printable
from openrl.trace.history import histories
from openrl.trace.index import Columns
from openrl.trace.query import Query, select
from openrl.trace.reader import Trace

EXAMPLES = """
examples:
  python -m openrl.cli.trace RUN --step 50 --sort reward     the lowest rewards of step 50 first
  python -m openrl.cli.trace RUN --step 50 --sort advantage  those worse than their siblings first
  python -m openrl.cli.trace RUN 50/13                       one in full, coloured by advantage
  python -m openrl.cli.trace RUN 50/13 --color_by gap
  python -m openrl.cli.trace RUN 50/70 --transcript          who said what in which turn
  python -m openrl.cli.trace RUN --text "I cannot" --json    a JSON object per trajectory
  python -m openrl.cli.trace RUN --history --limit 0         the solve rate of each prompt
  python -m openrl.cli.trace rescore RUN --remote_rm_url new_reward.py

docs/trace.md explains the columns.
"""


def main(argv: Sequence[str]) -> int:
    """Return the exit code."""
    if argv[:1] == ["rescore"]:
        from openrl.cli.rescore import main as rescore  # loads what judges

        return rescore(argv[1:])
    return show(argv)


@printing("trace")
def show(argv: Sequence[str]) -> int:
    """Return the exit code."""
    gc.disable()  # it would look through a large index again and again, and find nothing
    given = parser().parse_args(argv)
    trace = Trace(given.run)
    if given.trajectory is None:
        list_kept(trace, given)
    else:
        shown(trace, given)
    for problem in trace.problems:
        print(printable(f"trace: warning: {problem}"), file=sys.stderr)
    return 0


def parser() -> argparse.ArgumentParser:
    what = "List the kept trajectories of a run, or show one."
    found = words_parser("trace", what, EXAMPLES)
    add = found.add_argument
    add("run", metavar="RUN", help="the run's --save_path, or the directory of its trace")
    add("trajectory", nargs="?", type=number, metavar="STEP/NUMBER", help="show this one in full")
    add("--step", type=steps, metavar="N or A-B", help="of this step, or of these")
    add("--source", help="of this data source or tag")
    add("--tag", choices=("train", "filtered", "replayed", "evaluation"))
    add("--agent", help="of this agent")
    add("--prompt_id", metavar="ID", help="of this row of the data, e.g. train:17")
    add("--reward_min", type=float, metavar="FLOAT")
    add("--reward_max", type=float, metavar="FLOAT")
    add("--failed", action="store_true", default=None, help="whose episode or reward failed")
    add("--text", help="with this in prompt or response; upper and lower case are the same")
    add("--sort", default="step", metavar="COLUMN", help="smallest first; --sort=-COLUMN: largest")
    add("--limit", type=int, default=20, metavar="N", help="show at most this many; 0: all")
    add(
        "--color_by",
        choices=("advantage", "gap", "entropy", "age", "mask"),
        default="advantage",
        help="what the colour of a token shows",
    )
    add("--transcript", action="store_true", help="show who said what, instead of the tokens")
    add("--history", action="store_true", help="one line per prompt: what each step made of it")
    add("--json", action="store_true", help="print JSON: one object per line, or the whole record")
    return found


def steps(text: str) -> tuple[int, int]:
    if not (found := re.fullmatch(r"(\d+)(?:-(\d+))?", text)):
        raise argparse.ArgumentTypeError(f"{text!r}: a step such as 50, or steps such as 40-60")
    return int(found[1]), int(found[2] or found[1])


def number(text: str) -> tuple[int, int]:
    if not (found := re.fullmatch(r"(\d+)/(\d+)", text)):
        raise argparse.ArgumentTypeError(f"{text!r}: the first column of the list, such as 50/13")
    return int(found[1]), int(found[2])


def list_kept(trace: Trace, given: argparse.Namespace) -> None:
    """Print the trajectories that the filters leave."""
    columns = trace.index()
    names = ("step", "source", "tag", "agent", "prompt_id", "reward_min", "reward_max", "failed")
    query = Query(
        **{name: getattr(given, name) for name in names}, text=given.text, sort=given.sort
    )
    rows = select(trace, columns, query)
    if given.history:
        told(columns, rows, given)
        return
    shown_rows = rows[: given.limit] if given.limit else rows
    if given.json:
        for row in shown_rows:
            print(json.dumps({name: column[row] for name, column in columns.items()}))
        return
    from openrl.trace.show import table
    from openrl.tracking.console import PlainConsole

    console = PlainConsole()
    console.print(table(columns, shown_rows, console.width))
    kept = len(columns["step"])
    console.print(f"{len(shown_rows)} of {len(rows)} found, of {kept} in the trace")
    if not rows and kept:
        steps = "" if given.step is None else f"; steps in the trace: {spans(columns['step'])}"
        console.print(f"nothing matches {', '.join(query.filters)}{steps}")


def spans(steps: Iterable[int]) -> str:
    """Return the different steps with neighbours joined: "1-49, 51"."""
    ends: list[list[int]] = []
    for step in sorted(set(steps)):
        if ends and step == ends[-1][1] + 1:
            ends[-1][1] = step
        else:
            ends.append([step, step])
    return listed([f"{a}-{b}" if a < b else str(a) for a, b in ends])


def told(columns: Columns, rows: Sequence[int], given: argparse.Namespace) -> None:
    """Print what each step made of the prompts of these rows."""
    found = histories(columns, rows)
    some = dict(list(found.items())[: given.limit or None])
    if given.json:
        for prompt, steps in some.items():
            print(
                json.dumps({"prompt_id": prompt, "steps": {n: vars(p) for n, p in steps.items()}})
            )
        return
    from openrl.trace.show import history_table
    from openrl.tracking.console import PlainConsole

    console = PlainConsole()
    console.print(history_table(some))
    console.print(
        f"{len(some)} of {len(found)} prompts, of {len(columns['step'])} trajectories kept"
    )


def shown(trace: Trace, given: argparse.Namespace) -> None:
    """Print one trajectory."""
    step, of_step = given.trajectory
    found: dict[str, Any] = trace.trajectory(step, of_step)
    siblings = trace.group(step, of_step)
    if given.json:
        print(json.dumps(found | {"siblings": siblings}))
        return
    from openrl.trace.show import transcript, whole
    from openrl.tracking.console import PlainConsole

    console = PlainConsole()
    for line in transcript(found) if given.transcript else whole(found, siblings, given.color_by):
        console.print(line, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
