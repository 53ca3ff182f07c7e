"""Training on the recorded rollouts of another run, without engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openrl.metrics import Metric
from openrl.tracking.progress import Tell
from openrl.trainer.playing.buffer import RolloutBatch, RolloutBuffer
from openrl.trainer.playing.engine_pool import EnginePool
from openrl.trainer.playing.rollout_files import path_of, read_rollout_batch
from openrl.trainer.playing.rollouts import Rollouts, RolloutSettings
from openrl.trainer.workers.publisher import CallEngines, Publisher
from openrl.trainer.workers.residency import Residency


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

    async def state(self) -> dict[str, Any]:
        return {"steps": self.buffer.steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self.buffer.steps = state["steps"]


class NoEngines(Publisher):
    """A publisher that counts versions but sends no weights."""

    def notes(self) -> list[str]:
        return ["weights travel nowhere: rollouts are replayed"]

    async def publish(self, call_living: CallEngines | None = None) -> dict[str, Metric]:
        self.version += 1
        return {}
