"""Files that keep the complete rollouts of each step, and training on those of another run, without
engines.

<--rollout_dump_dir>/
    step_000003.jsonl   the rollouts of step 3: a line about the step, then one line per group
    eval_000003.jsonl   the answers of the evaluation after step 3: one line per group
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from openrl.errors import UserError
from openrl.files import write_atomically
from openrl.metrics import Metric
from openrl.tracking.progress import Tell
from openrl.trainer.rollout.buffer import RolloutBatch, RolloutBuffer
from openrl.trainer.rollout.engine_pool import EnginePool
from openrl.trainer.rollout.rollouts import Rollouts, RolloutSettings
from openrl.trainer.rollout.saved_groups import group_from_json, group_to_json
from openrl.types import Prompt, PromptGroup
from openrl.workers.residency import Residency
from openrl.workers.weight_sync import CallEngines, WeightSync


class Replay(Rollouts):
    """Reads the groups of each step from its file instead of playing prompts."""

    def __init__(
        self,
        directory: Path,
        pool: EnginePool,
        buffer: RolloutBuffer,
        residency: Residency,
        settings: RolloutSettings,
    ) -> None:
        super().__init__(pool, buffer, residency, settings)
        self.directory = directory
        self.prompts = {prompt.id: prompt for prompt in buffer.prompts.items}

    async def take(self, tell: Tell) -> RolloutBatch:
        self.buffer.steps += 1
        return read_rollout_batch(path_of(self.directory, self.buffer.steps), self.prompts)

    def state(self) -> dict[str, Any]:
        return {"steps": self.buffer.steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self.buffer.steps = state["steps"]


class NoEngines(WeightSync):
    """A weight_sync that counts versions but sends no weights."""

    def notes(self) -> list[str]:
        return ["weights travel nowhere: rollouts are replayed"]

    async def sync(self, call_living: CallEngines | None = None) -> dict[str, Metric]:
        self.version += 1
        return {}


def dump_rollouts(directory: Path, step: int, taken: RolloutBatch) -> None:
    number = {id(group): n for n, group in enumerate(taken.generated)}
    trained = [number[id(group)] for group in taken.groups]
    head = {"version": taken.version, "counts": taken.counts, "trained": trained}
    _write(path_of(directory, step), [head, *map(group_to_json, taken.generated)])


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


def read_rollout_batch(path: Path, prompts: dict[str, Prompt]) -> RolloutBatch:
    """Read the rollouts of a step. Raises UserError if ``prompts``, by id, lack one."""
    head, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    try:
        generated = [group_from_json(row, prompts) for row in rows]
    except KeyError as error:
        message = f"{path}: the data lacks prompt {error}"
        raise UserError(message, "the same --prompt_data as in the run that wrote it") from None
    groups = [generated[index] for index in head["trained"]]
    return RolloutBatch(groups, generated, head["version"], head["counts"])
