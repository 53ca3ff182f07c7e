"""The supervision of a training run: it owns directories and logs, restarts the run if a worker is
lost, and listens to the signals that ask it to end, so that it saves its state if there is time."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from openrl.cluster.group import WorkerDied, WorkerTimeout
from openrl.config.commands import TrainingConfig
from openrl.config.conditions import RAY
from openrl.config.derived import logging_directory
from openrl.config.groups.checkpoint import CheckpointFlags
from openrl.config.groups.placement import has_launcher
from openrl.errors import Interrupted, UserError, printable
from openrl.files import as_utf8
from openrl.tracking.progress import Progress
from openrl.trainer.saving.checkpoints import Checkpoints, find_start, own_directories
from openrl.waiting import cancel_all

Config = TypeVar("Config", bound=TrainingConfig)
log = logging.getLogger(__name__)
Result = TypeVar("Result")
SIGNALS = (signal.SIGTERM, signal.SIGINT)  # Slurm and Kubernetes send the first, Ctrl-C the second


class StopRequest:
    """A request to stop, made by signals. The first signal asks the run to end within ``grace``
    seconds; the second ends the process at once."""

    def __init__(self, grace: float = 30.0) -> None:
        self.grace, self.signal = grace, 0
        self._came_here = False  # whether this process has got a signal itself
        # True once there is something to save: the run then ends by itself within ``grace``
        self.saves = False
        self._warned = False
        self._signalled = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None  # the run

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for signals inside the with block, if in the main thread, which receives them."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # not by the event loop, which a step of a model in this process keeps busy
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        for number in SIGNALS:
            signal.siginterrupt(number, False)  # as an event loop does
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._came_here:
            tell_directly(f"{signal.Signals(number).name} again: ended at once")
            os._exit(128 + number)
        self._came_here = True
        self.act_on(number)

    def act_on(self, number: int) -> None:
        """Act on a signal, which may have come to another process of the run, unless one has come
        before. This runs between any two instructions of the main thread, which may be printing, so
        it writes to stderr past Python's buffer."""
        if self.signal:
            return
        self.signal = number
        if self.saves:
            tell_directly(f"{signal.Signals(number).name}: the run saves what it has and ends")
        loop = self._loop
        assert loop is not None, "within ``listening``"
        loop.call_soon_threadsafe(self._answer, loop.time() + self.grace)

    def _answer(self, deadline: float) -> None:
        assert self._loop and self._task
        self._signalled.set()
        if self.saves:
            self._deadline = self._loop.call_at(deadline, self._task.cancel)
        else:
            self._task.cancel()

    async def unless_stopped(self, work: Awaitable[Result]) -> Result | None:
        """Return the result of ``work``; None, and cancel it, if the run is asked to end first."""
        task, came = asyncio.ensure_future(work), asyncio.ensure_future(self._signalled.wait())
        try:
            await asyncio.wait({task, came}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            await cancel_all([task, came])

    def too_short(self, seconds: float) -> str:
        """Return a warning, once, if the grace is shorter than ``seconds``, which a step takes from
        its first optimizer step to its end, plus its checkpoint. An earlier signal drops the step.
        """
        if seconds <= self.grace or self._warned:
            return ""
        self._warned = True
        return (
            f"WARNING: --grace_period {self.grace:g} is shorter than a step and its checkpoint"
            f" ({seconds:.0f} s): a signal after the first optimizer step would lose everything"
            " since the last checkpoint."
            f" Use --grace_period {math.ceil(1.5 * seconds)}, and give the job as long to end."
        )

    def lift_deadline(self) -> None:
        """Give the clean-up all the time it needs, whatever signal came or comes: everything is
        saved."""
        self.grace = math.inf
        if self._deadline:
            self._deadline.cancel()

    def interrupted(self, what: str, remedy: str = "") -> Interrupted:
        """Return the exception that ends the run, for the caller to raise. Lifts the deadline."""
        self.lift_deadline()
        return Interrupted(self.signal, f"{signal.Signals(self.signal).name}: {what}", remedy)


def tell_directly(line: str) -> None:
    with suppress(OSError):  # the terminal is gone
        os.write(2, as_utf8(f"{line}\n"))


class WorkerLost(UserError):
    """A worker died or hangs: which, when, in which stage, its last words, how to continue.
    ``resume`` are the checkpoint flags that continue the run."""

    def __init__(self, message: str, remedy: str, resume: Any) -> None:
        super().__init__(message, remedy)
        self.resume: Any = resume  # of the type that the command has


async def supervise(
    config: Config, once: Callable[[Config, StopRequest], Awaitable[Result]]
) -> Result:
    """Run ``once(config, stop)`` and return its result. If a worker is lost, run it again from the
    last checkpoint, up to --max_restarts times. Raises Interrupted after a signal."""
    stop = StopRequest(config.faults.grace_period)
    with own_directories(config.checkpoint), driver_log(config), stop.listening():
        return await with_restarts(config, stop, once)


async def with_restarts(
    config: Config, stop: StopRequest, once: Callable[[Config, StopRequest], Awaitable[Result]]
) -> Result:
    # under a launcher the other ranks end, and this one cannot go on without them
    left = config.faults.max_restarts if RAY.holds(config) else 0
    while True:
        try:
            return await once(config, stop)
        except WorkerLost as lost:
            if not left or stop.signal:
                raise
            log.exception("a worker was lost")
            left -= 1
            again = f"restarting; {left} of --max_restarts left"
            print(printable(f"{lost.message}\n  {again}"), flush=True)
            stop.saves = False
            config = replace(config, checkpoint=lost.resume)


@contextmanager
def explain_end(progress: Progress, checkpoints: Checkpoints, stop: StopRequest) -> Iterator[None]:
    """Inside the with block, turn the loss of a worker into WorkerLost, and a cancellation that
    follows a signal into Interrupted."""
    try:
        yield
    except (WorkerDied, WorkerTimeout) as error:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        stage = f", during {progress.failed_in}" if progress.failed_in else ""
        message = f"{error}\n  noticed {when} in step {progress.done + 1}{stage}"
        resume = checkpoints.resume_flags()
        raise WorkerLost(message, how_to_resume(checkpoints), resume) from error
    except asyncio.CancelledError:
        if not stop.signal:
            raise
        what = "the run had not begun to train"
        if stop.saves:
            what = f"not everything could be saved within --grace_period {stop.grace:g}"
        raise stop.interrupted(what, how_to_resume(checkpoints)) from None


def how_to_resume(checkpoints: Checkpoints) -> str:
    """Return the command that continues the run from its newest checkpoint or, before it has
    written one, from where it began."""
    flags, resume = checkpoints.flags, checkpoints.resume_flags()
    try:
        last, _ = find_start(resume, deep=False)
    except UserError as error:  # what there is cannot be resumed from
        return f"{error.remedy}: {error.message}"
    if last is None:
        trained = (Path(flags.save_path).expanduser() / "metrics.jsonl").exists()
        refused = trained and not (flags.resumes or flags.overwrite_ckpt)
        again = "the same command" + (" with --overwrite_ckpt" if refused else "")
        return f"{again}; no checkpoint was written (--save_steps {flags.save_steps})"
    if resume.resume_from_checkpoint is not None:
        return f"the same command, which continues from {last}"
    command = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    command += resuming(sys.argv[1:], flags)
    launcher = "with the same launcher: " if has_launcher() else ""
    return f"{launcher}{shlex.join(command)}\n       which continues from {last}"


BEGINS_ELSEWHERE = {
    "--no_overwrite_ckpt": ("overwrite_ckpt", "overwrite"),
    "--resume_from_checkpoint=None": ("resume_from_checkpoint",),
}
"""The flags, by all their names, with which a run does not begin at its newest checkpoint, and what
turns each off."""


def resuming(words: Sequence[str], flags: CheckpointFlags) -> list[str]:
    """Return the words of a command line, changed so that it continues from the newest checkpoint.
    ``flags`` are those in effect, perhaps by a file that the words name."""
    words = list(words)
    for off, names in BEGINS_ELSEWHERE.items():
        kept = without_flag(words, *names)
        in_a_file = getattr(flags, names[0]) and kept == words
        words = [*kept, off] if in_a_file else kept
    loads = without_flag(words, "load_checkpoint") != words
    return words if loads else [*words, "--load_checkpoint"]


def without_flag(words: Sequence[str], *names: str) -> list[str]:
    """Return the words of a command line without the flag that has these names, and its value."""
    kept, inside = [], False
    for word in words:
        if word.startswith("--"):
            inside = word[2:].partition("=")[0] in names
        if not inside:
            kept.append(word)
    return kept


class LenientFileHandler(logging.FileHandler):
    """A log of what is said elsewhere too: a full disk leaves it incomplete and is no error."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def driver_log(config: TrainingConfig) -> Iterator[None]:
    """Log to driver.log too inside the with block, with the traceback of what leaves it."""
    directory = logging_directory(config)
    directory.mkdir(parents=True, exist_ok=True)
    root, to_file = logging.getLogger(), LenientFileHandler(directory / "driver.log", delay=True)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers = [to_file, *([] if root.handlers else [logging.lastResort])]
    for handler in filter(None, handlers):
        root.addHandler(handler)
    try:
        yield
    except Exception as error:
        record = log.makeRecord(
            log.name, logging.ERROR, __file__, 0, "the run ended: %s", (error,), sys.exc_info()
        )
        to_file.handle(record)
        raise
    finally:
        for handler in filter(None, handlers):
            root.removeHandler(handler)
        to_file.close()
