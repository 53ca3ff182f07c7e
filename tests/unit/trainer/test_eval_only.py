"""--eval_only: the real loop, which syncs, evaluates once, and trains and writes nothing."""

import asyncio
from types import SimpleNamespace

from openrl.config.groups.checkpoint import RLCheckpointFlags
from openrl.config.groups.evaluation import PromptEvalFlags
from openrl.metrics import Mean
from openrl.trainer import rl_trainer
from openrl.trainer.rl_trainer import RLTrainer, RunSettings
from openrl.trainer.rollout.buffer import BufferLimits, RolloutBuffer
from openrl.trainer.rollout.engine_pool import EnginePool
from openrl.trainer.rollout.evaluation import PASS_RATE
from openrl.trainer.rollout.rollouts import Rollouts
from openrl.types import Sampling
from openrl.workers.residency import Residency
from openrl.workers.rollout_worker import RolloutRequest
from tests.loops import Trackers, WeightSync, silent_progress


class Engines(WeightSync):
    async def send(self):
        self.run.asked.append("publish")


def test_an_evaluation_alone(tmp_path, monkeypatch):
    trackers, asked = Trackers(), []

    async def check_sync(*args):
        asked.append("check_sync")

    async def run(rollouts, tell):
        return {PASS_RATE: Mean(3, 4)}

    async def scenario():
        trainer = RLTrainer(
            Rollouts(
                EnginePool(SimpleNamespace(size=1)),
                RolloutBuffer(None, BufferLimits(1)),
                Residency(),
                RolloutRequest(1, Sampling(1)),
            ),
            SimpleNamespace(settings=SimpleNamespace(dtype="fp32")),
            Engines(SimpleNamespace(version=0, asked=asked)),
            SimpleNamespace(run=run, answered=()),
            SimpleNamespace(resume=lambda note: None),
            trackers,
            silent_progress(5),
            RunSettings(
                RLCheckpointFlags(save_path=str(tmp_path / "out")),
                PromptEvalFlags(eval_only=True),
                1,
            ),
        )
        return await trainer.fit()

    monkeypatch.setattr(rl_trainer, "check_sync", check_sync)
    summary = asyncio.run(scenario())
    assert asked == ["publish", "check_sync"]
    assert trackers.logged == [(0, {PASS_RATE: 0.75})] and trackers.closed
    assert summary.steps == 0 and summary.eval_pass_after == 0.75
    assert not (tmp_path / "out").exists()
