"""Faults, injected into real runs: how each is done, and what is left afterwards."""

from __future__ import annotations

import getpass
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from openrl.tracking.jsonl import read_jsonl
from tests.e2e.runs import ppo_flags
from tests.patience import PATIENCE, still_running

STEPS = 400  # far more than any of these runs gets to


@dataclass
class Faulty:
    """A run under way, and where it writes."""

    process: subprocess.Popen[bytes]
    out: Path
    checkpoints: Path
    said: Path  # what the driver prints
    # of its sockets and Ray's session; goes with this record
    folder: tempfile.TemporaryDirectory[str]
    children: set[psutil.Process] = field(default_factory=set)  # all that were seen
    shared: set[str] = field(default_factory=set)  # files of shared memory that they map

    @property
    def temporary(self) -> Path:
        return Path(self.folder.name)

    def pid(self, role: str, rank: int = 0) -> int:
        """By the log that it began."""
        log = self.out / f"logs/{role}-{rank}.log"
        return int(re.findall(r"process (\d+)", log.read_text())[-1])

    def children_of(self, role: str) -> list[psutil.Process]:
        return psutil.Process(self.pid(role)).children(recursive=True)

    def named(self, name: str) -> psutil.Process:
        """A process that the driver started."""
        return next(p for p in self.children if name in p.name())

    def kill(self, role: str, rank: int = 0) -> None:
        os.kill(self.pid(role, rank), signal.SIGKILL)

    def look(self) -> None:
        """Note the processes that live now, and their shared memory."""
        with suppress(psutil.NoSuchProcess):
            self.children.update(psutil.Process(self.process.pid).children(recursive=True))
        for pid in (self.process.pid, *(child.pid for child in self.children)):
            with suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text()
                self.shared.update(re.findall(r"/dev/shm/\S+", maps))

    def traces(self) -> list[str]:
        """What lies outside of its own directories, and nobody uses."""
        session = self.temporary / "ray"
        kept = (session, self.temporary / f"torchinductor_{getpass.getuser()}")  # a cache
        found = [p for p in self.temporary.iterdir() if p not in kept]
        found += [p for p in session.glob("session_*") if "latest" not in p.name]
        return sorted(map(str, found)) + sorted(p for p in self.shared if Path(p).exists())


@dataclass(frozen=True)
class End:
    """How a run ended after its fault."""

    code: int
    output: str
    said: str  # from the fault on
    seconds: float
    lost: int  # steps that were trained and are in no checkpoint
    left: list[str]  # processes, sockets, shared memory and Ray sessions of it


def begun(task: Path, out: Path, after: str = "checkpoints/step_000002", **changes: object):
    """A run whose file ``after`` exists, which is a path of its own or a pattern of its temporary
    directory."""
    flags: dict[str, object] = {"max_steps": STEPS, "num_episodes": STEPS, "save_steps": 2}
    flags |= {"rollout_backend": "hf"} | changes
    said = out.parent / f"{out.name}.txt"
    # under a longer path the sockets of vLLM would be too long for the session's own directory
    root = "/" if os.access("/", os.W_OK) else "/tmp"
    folder = tempfile.TemporaryDirectory(prefix="", dir=root, ignore_cleanup_errors=True)
    words = [sys.executable, "-m", "openrl.cli.train_ppo_ray", *ppo_flags(task, out, **flags)]
    with open(said, "w") as file:
        process = subprocess.Popen(
            words,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "TMPDIR": folder.name},
        )
    deadline = time.monotonic() + PATIENCE
    while not (out / after).exists() and not any(Path(folder.name).glob(after)):
        assert process.poll() is None, said.read_text()
        assert time.monotonic() < deadline, "the run never got there"
        time.sleep(0.02)  # polling a file of another process
    checkpoints = changes.get("ckpt_path", out / "checkpoints")
    return Faulty(process, out, Path(str(checkpoints)), said, folder)


def ended(run: Faulty, inject: Callable[[Faulty], None]) -> End:
    """What became of the run after ``inject(run)``."""
    run.look()
    started = time.monotonic()
    inject(run)
    while run.process.poll() is None:
        assert time.monotonic() < started + PATIENCE, "the run does not end"
        run.look()  # others take the places of those that died
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(timeout=1)
    seconds = time.monotonic() - started
    alive = still_running(run.children, timeout=60)  # Ray's agents look for their parent
    output = run.said.read_text()
    saved = [int(p.name[5:]) for p in run.checkpoints.glob("step_*")]
    log = run.out / "metrics.jsonl"  # a full disk tears the last one
    trained = [m["step"] for m in read_jsonl(log)] if log.exists() else []
    left = [f"process {' '.join(p.cmdline()[:2])}" for p in alive]
    left += run.traces()
    lines = output.splitlines()
    last = max((i for i, line in enumerate(lines) if line.startswith("tiny ")), default=-1)
    said = "\n".join(lines[last + 1 :])
    lost = max(trained, default=0) - max(saved, default=0)
    for process in alive:
        process.kill()
    return End(run.process.returncode, output, said, seconds, lost, left)
