"""--eval_only: the real loop, which publishes, evaluates once, and trains and writes nothing."""

import asyncio
from io import StringIO
from types import SimpleNamespace

from rich.console import Console

from openrl.config.correction import DynamicFilteringFlags
from openrl.config.data import PromptEvalFlags
from openrl.config.learning import RolloutBatchFlags
from openrl.config.rollout import CollectFlags
from openrl.config.run import RLCheckpointFlags
from openrl.data.prompts import PromptStream
from openrl.tracking.metrics import Mean
from openrl.tracking.progress import Progress
from openrl.trainer.evaluation import PASS_RATE
from openrl.trainer.rl_trainer import RLTrainer
from openrl.types import Prompt


class Pipeline:
    """Knows only what an evaluation may ask for; anything else is an AttributeError."""

    sync = SimpleNamespace(way="shared host memory")

    def __init__(self):
        self.asked, self.sync = [], SimpleNamespace(way="nothing")

    async def publish(self):
        self.asked.append("publish")
        return {}

    async def check_sync(self, prompts):
        self.asked.append("check_sync")

    async def collect(self, *args):
        raise AssertionError("the evaluation of this test has its answers")


def test_an_evaluation_alone(tmp_path):
    logged, pipeline = [], Pipeline()

    async def run(collect, on_group):
        return {PASS_RATE: Mean(3, 4)}

    trainer = RLTrainer(
        pipeline,
        PromptStream([Prompt(str(i), [1], "") for i in range(8)], seed=0),
        5,
        None,
        batch=RolloutBatchFlags(),
        collecting=CollectFlags(),
        filtering=DynamicFilteringFlags(),
        checkpoint=RLCheckpointFlags(save_path=str(tmp_path / "out")),
        evaluate=PromptEvalFlags(eval_only=True),
        evaluation=SimpleNamespace(run=run),
        checkpoints=SimpleNamespace(start_from=None),
        trackers=SimpleNamespace(
            log=lambda step, values: logged.append((step, values)),
            close=lambda: logged.append("closed"),
        ),
        progress=Progress("test", 5, (), console=Console(file=StringIO())),
        flags={},
    )
    summary = asyncio.run(trainer.fit())
    assert pipeline.asked == ["publish", "check_sync"]
    assert logged == [(0, {PASS_RATE: 0.75}), "closed"]
    assert summary.steps == 0 and summary.eval_pass_after == 0.75
    assert not (tmp_path / "out").exists()
