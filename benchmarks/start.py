"""How long it takes from the command to the first reward, and where the time goes.

    python -m benchmarks.start --starts 5

starts train_ppo_ray on a random model of 0.9M parameters: a policy, a reference and one vLLM
engine, one step. Prints the seconds of wall time after which each part of the start was over, and
the seconds of the processor that each process had taken until the first reward: median (smallest
to largest). ``--beside DIRECTORY`` takes turns with another checkout of this repository."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.marked_start import MARK, REWARD
from benchmarks.options import model_options, parser_of
from benchmarks.pairs import spread
from benchmarks.step_breakdown import ROOT, make_task, task_flags

# words of a command line -> the process; the first row that fits counts
KINDS = {
    "benchmarks.marked_start": "command",
    "AsyncActorHost": "rollout worker",
    "ActorHost": "policy, reference",
    "openrl.rollout_engines.vllm_imports": "engine, and the process it is forked from",
    "openrl.cluster.fork_server": "processes that workers are forked from, and the engine",
    "/ray/": "Ray",
    "ray::": "Ray",
}


def flags_of(args: argparse.Namespace, folder: Path, out: Path) -> list[str]:
    flags = task_flags(args, folder, out) | {
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 4,
        "train_batch_size": 32,
        "generate_max_len": 24,
        "max_steps": 1,
    }
    return [f"--{name}={value}" for name, value in flags.items()]


def one_start(checkout: Path, flags: list[str]) -> tuple[dict[str, float], Counter[str]]:
    """Return when each part of the start was over, and the processor's seconds by process."""
    environ = {**os.environ, "PYTHONPATH": str(checkout)}
    began = time.monotonic()
    words = [sys.executable, "-m", "benchmarks.marked_start", *flags]
    over: dict[str, float] = {}
    spent, said = Counter[str](), []
    with subprocess.Popen(
        words,
        cwd=checkout,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as command:
        assert command.stdout is not None
        for line in command.stdout:
            said.append(line)
            if line.startswith(MARK):
                name, seconds = line.removeprefix(MARK).split(":")
                over[name] = float(seconds) - began
                if name == REWARD:
                    spent = processor_seconds(command.pid)
    if command.returncode or REWARD not in over:
        sys.exit("".join(said))
    return over, spent


def processor_seconds(pid: int) -> Counter[str]:
    """Return what a process and its descendants have taken, those that ended included."""
    spent = Counter[str]()
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):
            words = " ".join([process.name(), *process.cmdline()])
            kind = next((kind for word, kind in KINDS.items() if word in words), "others")
            spent[kind] += sum(process.cpu_times()[:4])  # type: ignore[assignment]
    spent["all"] = sum(spent.values())
    return spent


def report(starts: list[tuple[dict[str, float], Counter[str]]]) -> str:
    """Return both tables; a line is as late as its median."""
    lines = []
    for title, records in (
        ("over after, s", [over for over, _ in starts]),
        ("of the processor, s", [dict(spent) for _, spent in starts]),
    ):
        lines += [f"| | {title} |", "|---|---|"]
        columns = {name: [record.get(name, 0.0) for record in records] for name in records[0]}
        lines += [f"| {name} | {spread(column, 1)} |" for name, column in columns.items()]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="other checkouts")
    model_options(parser)
    args = parser.parse_args()
    starts: dict[Path, list[tuple[dict[str, float], Counter[str]]]] = {
        checkout.resolve(): [] for checkout in (ROOT, *args.beside)
    }
    with tempfile.TemporaryDirectory(prefix="openrl_start_") as folder:
        make_task(args, Path(folder))
        for number in range(args.starts):
            for turn, (checkout, done) in enumerate(starts.items()):
                out = Path(folder) / f"out-{number}-{turn}"
                done.append(one_start(checkout, flags_of(args, Path(folder), out)))
                over, spent = done[-1]
                times = ", ".join(f"{name} {seconds:.1f}" for name, seconds in over.items())
                print(f"{checkout}: {times}; {spent['all']:.1f} of the processor", file=sys.stderr)
    for checkout, done in starts.items():
        print(f"{checkout}, {len(done)} starts\n\n{report(done)}")


if __name__ == "__main__":
    main()
