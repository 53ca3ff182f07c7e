"""Which placement? The step time, idle GPUs and age of answers of each, from 1 to 1,024 GPUs,
without a GPU.

    python -m benchmarks.simulate_placement --gpus 8 64 512 --best_split
    python -m benchmarks.simulate_placement --metrics runs/mine/metrics.jsonl --engines 1
    python -m benchmarks.simulate_placement --published

The model is that of ``placement_model``: stage costs and lengths in, and the trainer's own rollout
buffer decides what waits for what. Costs are given by flags, or fitted to the steps of a run.
``--published`` shows the model beside measurements that others have published."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.options import parser_of
from benchmarks.placement_cases import cases
from benchmarks.placement_model import (
    Costs,
    Lengths,
    Outcome,
    Placement,
    Workload,
    best_split,
    fit_costs,
    simulate,
    splits,
)


def placements(
    gpus: int, ahead: list[int], oversample: list[float], staleness: int
) -> Iterator[Placement]:
    """What is compared; ``rollout_gpus`` 0: engines have some of the GPUs for themselves."""
    yield Placement(gpus)
    for ratio in oversample:
        yield Placement(gpus, partial=True, oversample=ratio, max_staleness=staleness)
    yield Placement(gpus, rollout_gpus=0)
    for steps in ahead:
        yield Placement(gpus, rollout_gpus=0, steps_ahead=steps)
        yield Placement(gpus, rollout_gpus=0, steps_ahead=steps, partial=True)


def outcome(work: Workload, placement: Placement, share: float | None) -> Outcome | None:
    """On ``share`` of the GPUs for rollouts, None: the best split. None if there are too few."""
    if placement.rollout_gpus is None:
        return simulate(work, placement) if placement.gpus >= work.engine_gpus else None
    if not (possible := splits(work, placement.gpus)):
        return None
    if share is None:
        return best_split(work, placement)
    nearest = min(possible, key=lambda split: abs(split - share * placement.gpus))
    return simulate(work, replace(placement, rollout_gpus=nearest))


def titled(title: str, columns: Sequence[str], left: str) -> Table:
    """An empty table whose columns, but for ``left``, hold numbers."""
    table = Table(title=title, title_justify="left", title_style="")
    for name in columns:
        table.add_column(name, justify="left" if name == left else "right")
    return table


def table_of(found: list[Outcome]) -> Table:
    columns = ("GPUs", "placement", "rollout GPUs", "step, s", "to colocated")
    table = titled("Placements", (*columns, "rollout idle", "train idle", "age"), "placement")
    together = {o.placement.gpus: o.step_seconds for o in found if o.placement.name == "colocated"}
    for o in found:
        gain = together.get(o.placement.gpus, math.nan) / o.step_seconds
        table.add_row(
            str(o.placement.gpus),
            o.placement.name,
            str(o.placement.rollout_gpus or "all"),
            f"{o.step_seconds:.4g}",
            f"{gain:.2f}",
            f"{o.rollout_idle:.0%}",
            f"{o.train_idle:.0%}",
            f"{o.age_mean:.2f}, at most {o.age_max}",
        )
    return table


def published_table() -> tuple[Table, list[dict[str, object]]]:
    """The cases of ``placement_cases``, beside what the model says of them."""
    columns = ("run", "published", "model", "off by")
    table = titled("Colocated step / asynchronous step", columns, "run")
    rows: list[dict[str, object]] = []
    for case in cases():
        together, apart = case.run()
        ratio = together.step_seconds / apart.step_seconds
        off = ratio / case.published - 1
        table.add_row(case.name, f"{case.published:.2f}", f"{ratio:.2f}", f"{off:+.0%}")
        known = {name: getattr(case, name) for name in ("name", "source", "inputs", "published")}
        outcomes = {"colocated": asdict(together), "asynchronous": asdict(apart)}
        rows.append(known | {"model": ratio} | outcomes)
    return table, rows


def costs_of(args: argparse.Namespace) -> Costs:
    """Fitted to ``--metrics``, or the default; flags that are given replace either."""
    costs = EXAMPLE
    if args.metrics:
        steps = [
            json.loads(line) for path in args.metrics for line in path.read_text().splitlines()
        ]
        costs = fit_costs(steps, args.engines, args.train_gpus)
    given = {name: getattr(args, name) for name in vars(EXAMPLE) if getattr(args, name) is not None}
    return replace(costs, **given)


EXAMPLE = Costs(0.010, 0.1e-3, 0.125e-3, 0.03e-3, 0.03e-3, sync=2.0, switch=4.0)
"""A model of 7B parameters on GPUs that train 8,000 tokens a second."""


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    costs = made.add_argument_group(
        "costs, seconds; without --metrics those of a model of 7B parameters"
    )
    for name, value in vars(EXAMPLE).items():
        costs.add_argument(f"--{name}", type=float, help=f"default {value:g}")
    costs.add_argument(
        "--metrics", type=Path, nargs="+", help="metrics.jsonl of runs to fit the costs to"
    )
    costs.add_argument("--engines", type=int, default=1, help="of those runs")
    costs.add_argument("--train_gpus", type=int, default=1, help="of those runs")
    work = made.add_argument_group("work of a step")
    work.add_argument("--samples", type=int, default=1024, help="answers")
    work.add_argument("--samples_per_prompt", type=int, default=8, help="of these")
    work.add_argument(
        "--mean_length", type=float, default=2000, help="tokens of an answer, before the cap"
    )
    work.add_argument("--sigma", type=float, default=0.75, help="of the logarithm of the length")
    work.add_argument("--cap", type=float, default=16384, help="tokens of the longest answer")
    work.add_argument("--prompt_length", type=float, default=200)
    where = made.add_argument_group("placements")
    where.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 8, 32, 128, 512, 1024])
    where.add_argument("--engine_gpus", type=int, default=1, help="GPUs of one engine")
    where.add_argument(
        "--steps_ahead", type=int, nargs="*", default=[1, 2], help="of asynchronous placements"
    )
    where.add_argument(
        "--oversample",
        type=float,
        nargs="*",
        default=[1.5, 2.0],
        help="prompts that run at a time, over those of a step, where the unfinished go on",
    )
    where.add_argument("--max_staleness", type=int, default=3, help="of those")
    where.add_argument(
        "--rollout_share", type=float, default=0.5, help="of the GPUs, where engines have their own"
    )
    where.add_argument(
        "--best_split", action="store_true", help="search for the share with the shortest step"
    )
    made.add_argument(
        "--published", action="store_true", help="the model beside published measurements"
    )
    made.add_argument("--json", type=Path, help="write the figures there, too")
    return made


def main(words: list[str] | None = None) -> int:
    args = parser().parse_args(words)
    if args.published:
        table, rows = published_table()
    else:
        lengths = Lengths(args.mean_length, args.sigma, args.cap, args.prompt_length)
        per_prompt, share = args.samples_per_prompt, None if args.best_split else args.rollout_share
        work = Workload(costs_of(args), lengths, args.samples, per_prompt, args.engine_gpus)
        settings = args.steps_ahead, args.oversample, args.max_staleness
        asked = [p for n in args.gpus for p in placements(n, *settings)]
        found = [o for placement in asked if (o := outcome(work, placement, share))]
        table, rows = table_of(found), [asdict(o) | {"name": o.placement.name} for o in found]
    Console(width=140).print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
