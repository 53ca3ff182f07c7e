"""The trace of an evaluation: every answer that it played, for people to read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from openrl.config.groups.logging import TraceFlags
from openrl.errors import UserError
from openrl.trace.places import files_by_step
from openrl.trace.writer import TraceWriter
from openrl.types import PromptGroup

AT_ONCE = 64  # prompts of a file


class Episodes:
    """Adds groups to a trace, AT_ONCE of them as what counts as a step there. A process that is
    killed loses those that are not a step yet."""

    def __init__(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        own = deepcopy(tokenizer)  # tokenizers may not be used by two threads at a time

        def pieces(token_ids: list[int]) -> list[str]:
            return [own.decode([token]) for token in token_ids]

        flags = TraceFlags(trace_sample_rate=1.0, trace_max_gb=0)
        self._writer = TraceWriter(directory, flags, pieces, keep_until=sys.maxsize)
        self._step = max(files_by_step(directory), default=-1) + 1
        self._groups: list[PromptGroup] = []

    def add(self, group: PromptGroup) -> None:
        """Raises UserError if the trace cannot be written."""
        self._groups.append(group)
        if len(self._groups) == AT_ONCE:
            with _disk_errors():
                self._write()

    def close(self) -> None:
        """Write what is left. Raises UserError if that is not possible."""
        with _disk_errors():
            if self._groups:
                self._write()
            self._writer.close()

    def _write(self) -> None:
        self._writer.evaluated(self._step, self._groups)
        self._step, self._groups = self._step + 1, []


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"--rollout_dump_dir: {error.filename} could not be written: {error.strerror}"
        raise UserError(message, "the same command, once there is room: it goes on") from error


@contextmanager
def open_episodes(
    directory: str | None, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Episodes | None]:
    """Give the trace in a directory, which is continued if it exists; None without a directory."""
    if directory is None:
        yield None
        return
    episodes = Episodes(Path(directory).expanduser(), tokenizer)
    try:
        yield episodes
    finally:
        episodes.close()


def check_directory(directory: str | None, continues: bool) -> None:
    """Raise UserError if the directory holds the trace of another run."""
    path = Path(directory or "").expanduser()
    if directory and not continues and path.is_dir() and files_by_step(path):
        message = f"--rollout_dump_dir: {directory} holds the trace of an earlier run"
        raise UserError(message, "another directory")
