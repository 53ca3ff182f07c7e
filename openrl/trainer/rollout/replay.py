"""The complete rollouts of a step as JSON: in files that another run can train on without engines,
and in the checkpoint of a run that stopped before it trained on them.

<--rollout_dump_dir>/
    step_000003.jsonl   the rollouts of step 3: a line about the step, then one line per group
    eval_000003.jsonl   the answers of the evaluation after step 3: one line per group
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from openrl.data.order import SeededStream
from openrl.errors import UserError
from openrl.files import write_atomically
from openrl.trainer.rollout.buffer import BufferLimits, RolloutBatch, RolloutBuffer
from openrl.trainer.rollout.filtering import DynamicFilter
from openrl.trainer.rollout.saved_groups import group_from_json, group_to_json
from openrl.types import Prompt, PromptGroup


class SavedRollouts(RolloutBuffer):
    """A buffer whose steps another run has played: ``take`` reads the file of the step, and no
    prompt starts."""

    def __init__(
        self,
        directory: Path,
        prompts: SeededStream[Prompt],
        limits: BufferLimits,
        group_filter: DynamicFilter | None = None,
    ) -> None:
        super().__init__(prompts, limits, group_filter)
        self.directory = directory

    def _admissible(self) -> None:
        return None

    async def take(self) -> RolloutBatch:
        self.steps += 1
        path = path_of(self.directory, self.steps)
        lines = path.read_text(encoding="utf-8").splitlines()
        try:
            return batch_from_json([*map(json.loads, lines)], self.prompts.items)
        except KeyError as error:
            message = f"{path}: the data lacks prompt {error}"
            raise UserError(message, "the same --prompt_data as in the run that wrote it") from None

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def batch_to_json(batch: RolloutBatch) -> list[Any]:
    """Return a line about the step, then one per group, as JSON values."""
    number = {id(group): n for n, group in enumerate(batch.generated)}
    trained = [number[id(group)] for group in batch.groups]
    head = {"version": batch.version, "counts": batch.counts, "trained": trained}
    return [head, *map(group_to_json, batch.generated)]


def batch_from_json(lines: list[Any], prompts: Iterable[Prompt]) -> RolloutBatch:
    """The inverse of ``batch_to_json``. Raises KeyError if ``prompts`` lack one."""
    head, *rows = lines
    known = {prompt.id: prompt for prompt in prompts}
    generated = [group_from_json(row, known) for row in rows]
    groups = [generated[index] for index in head["trained"]]
    return RolloutBatch(groups, generated, head["version"], head["counts"])


def dump_rollouts(directory: Path, step: int, batch: RolloutBatch) -> None:
    _write(path_of(directory, step), batch_to_json(batch))


def dump_evaluated(directory: Path, step: int, groups: list[PromptGroup]) -> None:
    _write(directory / f"eval_{step:06d}.jsonl", map(group_to_json, groups))


def _write(path: Path, rows: Iterable[Any]) -> None:
    write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def path_of(directory: Path, step: int) -> Path:
    return directory / f"step_{step:06d}.jsonl"


def check_steps_kept(directory: Path, first: int, last: int) -> None:
    """Raise UserError unless ``directory`` has all steps from ``first`` to ``last``."""
    missing = [step for step in range(first, last + 1) if not path_of(directory, step).is_file()]
    if missing:
        fix = f"--max_steps {missing[0] - 1}" if missing[0] > first else "another directory"
        raise UserError(
            f"--rollout_replay_dir {directory} has no rollouts of step {missing[0]}", fix
        )
