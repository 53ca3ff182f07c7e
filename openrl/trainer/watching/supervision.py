"""The supervision of a training run: it owns directories and logs, restarts the run if a worker is
lost, and listens to the signals that ask it to end, so that it saves its state if there is time."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from openrl.cluster.group import WorkerDied, WorkerTimeout
from openrl.config.commands import TrainingConfig
from openrl.config.groups.checkpoint import CheckpointFlags
from openrl.errors import Interrupted, UserError, printable
from openrl.tracking.progress import Progress
from openrl.trainer.saving.checkpoints import find_start, own_directories
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
        # True once there is something to save: the run then ends by itself within ``grace``
        self.saves = False
        self._signalled = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for signals inside the with block, if in the main thread, which receives them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number, task)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals, task: asyncio.Task[object]) -> None:
        if self.signal:
            print(f"{number.name} again: ended at once", file=sys.stderr, flush=True)
            os._exit(128 + number)
        self.signal = number
        self._signalled.set()
        if self.saves:
            print(f"{number.name}: the run saves what it has and ends", file=sys.stderr, flush=True)
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self.grace, task.cancel)
        else:
            task.cancel()

    async def unless_stopped(self, work: Awaitable[Result]) -> Result | None:
        """Return the result of ``work``; None, and cancel it, if the run is asked to end first."""
        task, came = asyncio.ensure_future(work), asyncio.ensure_future(self._signalled.wait())
        try:
            await asyncio.wait({task, came}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            await cancel_all([task, came])

    def interrupted(self, what: str, remedy: str = "") -> Interrupted:
        """Return the exception that ends the run, for the caller to raise. Lifts the deadline, so
        that the clean-up has all the time it needs."""
        if self._deadline:
            self._deadline.cancel()
        number = self.signal or signal.SIGTERM  # without a signal of our own another rank got it
        return Interrupted(number, f"{signal.Signals(number).name}: {what}", remedy)


class WorkerLost(UserError):
    """A worker died or hangs: which, when, in which stage, its last words, how to continue."""


async def supervise(
    config: Config, once: Callable[[Config, StopRequest], Awaitable[Result]], is_rank_0: bool = True
) -> Result:
    """Run ``once(config, stop)`` and return its result. If a worker is lost, run it again from the
    last checkpoint, up to --max_restarts times. Raises Interrupted after a signal. Only rank 0
    owns the directories and restarts."""
    stop = StopRequest(config.faults.grace_period)
    if not is_rank_0:
        with stop.listening():
            return await once(config, stop)
    with own_directories(config.checkpoint), driver_log(config), stop.listening():
        try:
            return await with_restarts(config, stop, once)
        except asyncio.CancelledError:
            if not stop.signal:
                raise
            what = "the run had not begun to train"
            if stop.saves:
                what = f"nothing new could be saved within --grace_period {stop.grace:g}"
            raise stop.interrupted(what, how_to_resume(config.checkpoint)) from None


async def with_restarts(
    config: Config, stop: StopRequest, once: Callable[[Config, StopRequest], Awaitable[Result]]
) -> Result:
    left = config.faults.max_restarts
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
            config = replace(config, checkpoint=resume_flags(config.checkpoint))


@contextmanager
def raise_worker_lost(progress: Progress, flags: CheckpointFlags) -> Iterator[None]:
    """Turn the loss of a worker into WorkerLost inside the with block."""
    try:
        yield
    except (WorkerDied, WorkerTimeout) as error:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        stage = f", during {progress.failed_in}" if progress.failed_in else ""
        message = f"{error}\n  noticed {when} in step {progress.done + 1}{stage}"
        raise WorkerLost(message, how_to_resume(flags)) from error


def resume_flags(flags: Any) -> Any:
    """Return these checkpoint flags, changed so that the run resumes from the newest checkpoint."""
    wanted = flags.load_checkpoint or True
    return replace(flags, load_checkpoint=wanted, resume_from_checkpoint=None, overwrite_ckpt=False)


def how_to_resume(flags: CheckpointFlags) -> str:
    """Return the command that resumes from the last checkpoint."""
    words = [word for word in sys.argv[1:] if word != "--overwrite_ckpt"]
    command = [*sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1], *words]
    try:
        last, _ = find_start(resume_flags(flags), deep=False)
    except UserError as error:  # what there is cannot be resumed from
        return f"{error.remedy}: {error.message}"
    if last is None:
        return f"the same command; no checkpoint was written (--save_steps {flags.save_steps})"
    if "--load_checkpoint" not in words:
        command.append("--load_checkpoint")
    return f"{shlex.join(command)}\n       which continues from {last}"


def logging_directory(config: TrainingConfig) -> Path:
    """Return the directory in which every process of the run writes its log."""
    named = config.logging.logging_dir
    directory = Path(named) if named else Path(config.checkpoint.save_path) / "logs"
    return directory.expanduser().absolute()


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
