"""The model of a run does not fit on its disk: what was trained is not lost."""

import asyncio
from types import SimpleNamespace

import pytest

from openrl.config.groups.checkpoint import RLCheckpointFlags
from openrl.config.groups.evaluation import PromptEvalFlags
from openrl.trainer.rl_trainer import RLTrainer, RunSettings
from openrl.trainer.saving.disk import DiskFull
from openrl.trainer.supervised.trainer import SupervisedTrainer
from tests.loops import silent_progress


@pytest.mark.parametrize("saved", [2, 3])
@pytest.mark.parametrize("kind", [RLTrainer, SupervisedTrainer])
def test_a_model_without_room_leaves_a_checkpoint(kind, saved):
    """One of the last step, which may find room on another disk, unless there is one."""
    asked = []

    class Trainer(kind):
        def __init__(self):
            self.step, self.checkpoints = 3, SimpleNamespace(saved=saved)
            self.progress, self.checkpoint = silent_progress(3), RLCheckpointFlags()
            self.settings = RunSettings(self.checkpoint, PromptEvalFlags(), 1)
            self.stop = self.settings.stop
            self.model = SimpleNamespace(group=SimpleNamespace(any_rank=self.any_rank))

        async def any_rank(self, asked):
            return asked

        async def run_steps(self):
            pass

        async def export(self, directory, role="actor"):
            raise DiskFull("the model could not be written")

        async def save(self, metric=None):
            asked.append("save")

    with pytest.raises(DiskFull, match="the model could not be written"):
        asyncio.run(Trainer().train())
    assert asked == ["save"] * (saved < 3)
