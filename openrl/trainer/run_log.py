"""The logs that a run leaves: one of each worker's process, and driver.log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openrl.config.commands import TrainingConfig

log = logging.getLogger(__name__)


def logging_directory(config: TrainingConfig) -> Path:
    """Where every process of the run leaves its log."""
    named = config.logging.logging_dir
    directory = Path(named) if named else Path(config.checkpoint.save_path) / "logs"
    return directory.expanduser().absolute()


@contextmanager
def driver_log(config: TrainingConfig) -> Iterator[None]:
    """Within it what this process logs goes to driver.log as well, and the traceback of an error
    that leaves."""
    directory = logging_directory(config)
    directory.mkdir(parents=True, exist_ok=True)
    root, to_file = logging.getLogger(), logging.FileHandler(directory / "driver.log", delay=True)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers = [to_file, *([] if root.handlers else [logging.lastResort])]
    for handler in filter(None, handlers):
        root.addHandler(handler)
    try:
        yield
    except Exception as error:
        to_file.handle(
            log.makeRecord(
                log.name, logging.ERROR, __file__, 0, "the run ended: %s", (error,), sys.exc_info()
            )
        )
        raise
    finally:
        for handler in filter(None, handlers):
            root.removeHandler(handler)
        to_file.close()
