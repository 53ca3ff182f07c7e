"""Steps whose rollouts another run has played: they are read from its trace and trained on without
engines. And a step that a run has played but not trained on, as it stands in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from openrl.data.order import PromptOrder
from openrl.errors import UserError
from openrl.trace.reader import Trace
from openrl.trace.record import group_from_json, group_to_json
from openrl.trainer.rollout.buffer import BufferLimits, RolloutBatch, RolloutBuffer
from openrl.trainer.rollout.filtering import DynamicFilter
from openrl.types import Prompt


class SavedRollouts(RolloutBuffer):
    """A buffer whose steps another run has played: ``take`` reads the trace in ``directory``, and
    no prompt starts."""

    def __init__(
        self,
        directory: Path,
        prompts: PromptOrder,
        limits: BufferLimits,
        group_filter: DynamicFilter | None = None,
    ) -> None:
        super().__init__(prompts, limits, group_filter)
        self.trace = Trace(directory)

    def _admissible(self) -> None:
        return None

    async def take(self) -> RolloutBatch:
        self.steps += 1
        try:
            step = self.trace.replay(self.steps, self.prompts.items)
        except KeyError as error:
            message = f"{self.trace.directory}: the data lacks prompt {error}"
            raise UserError(message, "the same --prompt_data as in the run that wrote it") from None
        groups = [step.groups[place] for place in step.trained]
        return RolloutBatch(groups, step.groups, step.version, step.counts)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def batch_to_json(batch: RolloutBatch) -> list[Any]:
    """Return a line about the step, then one per group, as JSON values."""
    head = {"version": batch.version, "counts": batch.counts, "trained": batch.trained}
    return [head, *map(group_to_json, batch.generated)]


def batch_from_json(lines: list[Any], prompts: Iterable[Prompt]) -> RolloutBatch:
    """The inverse of ``batch_to_json``. Raises KeyError if ``prompts`` lack one."""
    head, *rows = lines
    known = {prompt.id: prompt for prompt in prompts}
    generated = [group_from_json(row, known) for row in rows]
    groups = [generated[index] for index in head["trained"]]
    return RolloutBatch(groups, generated, head["version"], head["counts"])


def check_steps_kept(directory: Path, first: int, last: int) -> None:
    """Raise UserError unless the trace in ``directory`` has all of every step from ``first`` to
    ``last``."""
    try:
        trace = Trace(directory)
    except UserError as error:
        raise UserError(f"--rollout_replay_dir: {error.message}", error.remedy) from None
    for step in range(first, last + 1):
        if trace.is_whole(step):
            continue
        kept = "only a sample" if trace.is_whole(step) is False else "no rollouts"
        fix = "another directory, written with --trace_sample_rate 1 or --rollout_dump_dir"
        fix = f"--max_steps {step - 1}" if step > first else fix
        raise UserError(f"--rollout_replay_dir {directory} has {kept} of step {step}", fix)
