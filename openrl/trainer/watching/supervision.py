"""The supervision of a training run: it owns directories, logs and signals, and restarts the run if
a worker is lost."""

from __future__ import annotations

import asyncio
import logging
import shlex
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from openrl.cluster.group import WorkerDied, WorkerTimeout
from openrl.config.commands import TrainingConfig
from openrl.config.groups.checkpoint import CheckpointFlags
from openrl.errors import UserError, printable
from openrl.tracking.progress import Progress
from openrl.trainer.saving.checkpoints import find_start, own_directories
from openrl.trainer.watching.stopping import StopRequest

Result = TypeVar("Result")
Config = TypeVar("Config", bound=TrainingConfig)
log = logging.getLogger(__name__)


class WorkerLost(UserError):
    """A worker died or hangs. The message says which one, when, in which stage, its last words and
    how to continue."""


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
        last = find_start(resume_flags(flags), deep=False).path
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
    """Log to driver.log too inside the with block, including the traceback of an error that leaves
    the block."""
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
