"""Everything that a short window on a GPU runs, in the order of its worth:

    python -m tests.gpu.window.call --seconds 430 smoke training engines
    python -m tests.gpu.window.call --seconds 215 floor
    python -m tests.gpu.window.call --seconds 200 "run:adapters, merged" tests/gpu/test_engine_sleep.py

A stage has phases, one after the other; the lanes of a phase run side by side, each a list of steps.
Each step has a limit, and none goes on beyond the end of the window. Under ``--out`` are summary.md (the
table, and the last lines of each failure), results.jsonl, and a log for each lane.

``--device cpu`` tries the scripts without a GPU, on tiny models: those steps that have such a form."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.gpu.window.results import RESULTS, record, table

LEAST_S = 12  # seconds; a step with less time left is not begun
MARK = "OPENRL_GPU_STEP"
"""The environment variable by which the processes of a step are found, also those in sessions of their
own, which would keep the GPU's memory."""

ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "4",
    # one cache of compiled kernels for all engines
    "VLLM_CACHE_ROOT": "/tmp/cache/vllm",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/cache/inductor",
    "TRITON_CACHE_DIR": "/tmp/cache/triton",
}


@dataclass(frozen=True)
class Step:
    """A command, and the most seconds that it may take. If a ``needed`` one fails, the window ends."""

    name: str
    seconds: float
    command: tuple[str, ...]
    needed: bool = False
    on_cpu: bool = False  # it takes --device cpu


Lane = Sequence[Step]


def tests(seconds: float, each: int, *arguments: str) -> Step:
    """Tests of ``make gpu``, each of at most ``each`` seconds."""
    options = ("-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "tests.gpu.window.results")
    words = ("-m", "pytest", *options, "-o", f"faulthandler_timeout={each}", *arguments)
    return Step(" ".join(arguments), seconds, words)


def script(name: str, seconds: float, *arguments: str, needed: bool = False) -> Step:
    """A module beside this one."""
    words = ("-m", f"tests.gpu.window.{name}", *arguments)
    return Step(" ".join([name, *arguments]), seconds, words, needed, on_cpu=name != "smoke")


def runs(seconds: float, *cases: str) -> list[Step]:
    """Whole runs of train_ppo_ray, one after the other."""
    return [script("runs", seconds, case) for case in cases]


# what reads the free memory of the whole GPU has a phase to itself
STAGES: dict[str, list[list[Lane]]] = {
    "smoke": [
        [[script("smoke", 75, "torch", needed=True)]],
        [[script("smoke", 90, "vllm", needed=True), script("contact", 150, needed=True)]],
    ],
    "training": [
        [
            [tests(200, 90, "tests/gpu/test_small_memory.py")],
            [tests(120, 60, "tests/gpu/test_attention.py")],
            runs(85, "hf engine", "hf engine, critic, ZeRO 3"),
        ],
    ],
    "engines": [
        [runs(100, "first"), runs(100, "first, host memory")],
        [[tests(150, 90, "tests/gpu/test_weight_sync.py")]],
        [[tests(200, 80, "tests/gpu/test_engine_sleep.py", "tests/gpu/test_training_sleep.py")]],
        [runs(110, "graphs")],
        [
            runs(90, "asleep, level 2", "adapters, as adapters", "8-bit optimizer"),
            runs(90, "parameters asleep", "adapters, merged", "packed"),
            runs(90, "4-bit weights", "states on the host", "asynchronous"),
        ],
        [[tests(200, 80, "tests/gpu/test_engines.py")]],
        [[tests(200, 110, "tests/gpu/test_colocated.py")]],
    ],
    "floor": [
        [[script("floor", 150, "engine"), script("floor", 90, "loop"), script("floor", 200, "run")]]
    ],
}


def phases_of(word: str) -> list[list[Lane]]:
    """Return the phases of a stage; "run:CASE" and a file of tests are stages of one step."""
    if word in STAGES:
        return STAGES[word]
    if word.startswith("run:"):
        return [[runs(100, word.removeprefix("run:"))]]
    return [[[tests(200, 90, *word.split())]]]


class Window:
    """Runs steps until ``seconds`` are over. Their logs and results lie in ``out``."""

    def __init__(self, seconds: float, out: Path, device: str) -> None:
        self.out, self.device = out, device
        self.started = time.monotonic()
        self.deadline = self.started + seconds
        self.over = False  # a needed step has failed

    def run(self, phases: list[list[Lane]]) -> None:
        for lanes in phases:
            with ThreadPoolExecutor(len(lanes)) as threads:
                list(threads.map(self._lane, range(len(lanes)), lanes))
            if self.over:
                return

    def _lane(self, number: int, steps: Lane) -> None:
        for step in steps:
            if self.over or (self.device == "cpu" and not step.on_cpu):
                continue
            room = min(step.seconds, self.deadline - time.monotonic())
            if room < LEAST_S:
                record(step.name, "skipped", 0, why="no time left")
                continue
            passed = self._step(step, room, self.out / f"lane{number}.log")
            self.over |= step.needed and not passed

    def _step(self, step: Step, seconds: float, log: Path) -> bool:
        """Run a step for at most ``seconds``; return whether it passed."""
        mark, begun = f"{os.getpid()}.{time.monotonic_ns()}", time.monotonic()
        words = [sys.executable, *step.command]
        if step.on_cpu:
            words += ["--device", self.device]
        with open(log, "a", encoding="utf-8") as file:
            process = subprocess.Popen(
                words, stdout=file, stderr=subprocess.STDOUT, env=os.environ | {MARK: mark}
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(8)  # it notes where it was
        end_marked(mark)
        outcome = "timeout" if code is None else "failed" if code else "passed"
        record(step.name, outcome, time.monotonic() - begun, why=f"exit code {code}")
        return code == 0


def end_marked(mark: str) -> None:
    """Kill every process that has ``mark`` in its environment."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                process.send_signal(signal.SIGKILL)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="+", help=f"{', '.join(STAGES)}, run:CASE, or tests")
    parser.add_argument("--seconds", type=float, default=430, help="how long the window is")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/gpu")))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out.absolute() / "results.jsonl"
    os.environ.update({n: v for n, v in ENVIRONMENT.items() if n not in os.environ})
    os.environ[RESULTS] = str(results)
    window = Window(args.seconds, args.out, args.device)
    for word in args.stages:
        window.run(phases_of(word))
        if window.over:
            print(f"{word}: a step that the others need has failed", flush=True)
            break
    summary = table([results]) if results.exists() else "nothing ran"
    (args.out / "summary.md").write_text(f"{summary}\n", encoding="utf-8")
    print(summary)
    return int(window.over)


if __name__ == "__main__":
    sys.exit(main())
