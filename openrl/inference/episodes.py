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
from openrl.trace.index import NAME, read_lines
from openrl.trace.writer import TraceWriter
from openrl.types import PromptGroup

AT_ONCE = 64  # prompts of a file


class Episodes:
    """Adds groups to a trace, AT_ONCE of them as what counts as a step there, whose number is the
    place of its first prompt. A process that is killed leaves out those that are not a step yet;
    ``prompts_in`` tells where the next one has to go on."""

    def __init__(self, directory: Path, tokenizer: PreTrainedTokenizerBase, first: int) -> None:
        """``first`` is the place of the next prompt."""
        own = deepcopy(tokenizer)  # tokenizers may not be used by two threads at a time

        def pieces(token_ids: list[int]) -> list[str]:
            return [own.decode([token]) for token in token_ids]

        begun = prompts_in(directory) is not None
        flags = TraceFlags(trace_sample_rate=1.0, trace_max_gb=0)
        self._writer = TraceWriter(directory, flags, pieces, keep_until=sys.maxsize)
        self._step = first
        self._groups: list[PromptGroup] = []
        if not begun:  # it says where the trace begins, even if there is never more
            self._writer.evaluated(first, [])

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
        self._step, self._groups = self._step + len(self._groups), []


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"--rollout_dump_dir: {error.filename} could not be written: {error.strerror}"
        raise UserError(message, "the same command, once there is room: it goes on") from error


@contextmanager
def open_episodes(
    directory: Path | None, tokenizer: PreTrainedTokenizerBase, first: int
) -> Iterator[Episodes | None]:
    """Give the trace in a directory, which is continued if it exists, from the ``first`` prompt
    on; None without a directory."""
    if directory is None:
        yield None
        return
    episodes = Episodes(directory, tokenizer, first)
    try:
        yield episodes
    finally:
        episodes.close()


def prompts_in(directory: Path) -> int | None:
    """Return up to which prompt a trace holds an evaluation; None if there is no trace."""
    if not (directory / NAME).is_file():
        return None
    return max(
        (r["step"] + r.get("groups", 0) for r in read_lines(directory).records), default=None
    )
