"""``python -m openrl.cli.metrics [NAME ...]`` explains the metrics that runs write; without names
it lists them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from openrl.cli.printing import printing, words_parser
from openrl.errors import printable
from openrl.tracking.metric_rows import (
    MetricRow,
    describe,
    metric_rows,
    names_elsewhere,
    row_of,
)


def asked_for(name: str) -> list[MetricRow]:
    """Return the row of a metric by its own name or another system's, or the rows whose names hold
    these letters, or the row of the family that it belongs to."""
    row = row_of(name)
    if row and row.name == name:
        return [row]
    other = names_elsewhere().get(name)
    holding = [row for row in metric_rows() if name.lower() in row.name.lower()]
    found = dict.fromkeys([row_of(other.here) if other else None, *holding])
    return [row for row in found if row] or ([row] if row else [])


def parser(names: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """``names`` are all that it takes; by default any, since a part of a name finds metrics too."""
    what = "Say what metrics mean, by their names or parts of them; without names all."
    found = words_parser("metrics", what)
    found.add_argument("names", nargs="*", metavar="NAME", choices=names)
    return found


@printing("metrics")
def main(argv: Sequence[str]) -> int:
    """Print what is known of the metrics. Returns the exit code: 1 if one is unknown."""
    names = parser().parse_args(argv).names
    if not names:
        print("\n".join(row.name for row in metric_rows()))
        return 0
    found = {name: asked_for(name) for name in names}
    rows = dict.fromkeys(row for rows in found.values() for row in rows)
    print("\n\n".join(map(describe, rows)))
    for name in [name for name, rows in found.items() if not rows]:
        print(printable(f"there is no metric {name}"), file=sys.stderr)
    return int(not all(found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
