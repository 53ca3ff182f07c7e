"""A disk that is full on one of two ranks: the other one does not wait for it, and both train on."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest
import torch.distributed as dist

from openrl.algorithms.policy_losses import PPOOptions
from openrl.cluster.launcher_group import LauncherGroup
from openrl.config.groups.checkpoint import CheckpointFlags
from openrl.config.groups.lora import LoRAFlags
from openrl.experience import StepPlan
from openrl.trainer.saving import disk
from openrl.trainer.saving.checkpoints import Checkpoints, step_of
from openrl.trainer.saving.disk import DiskFull, disk_is_full
from openrl.training_engine.build import build_engine
from openrl.training_engine.distributed import Launch, close_distributed, init_distributed
from openrl.training_engine.updates import PolicyUpdate
from tests.experience import counts_of, engine_spec, on_ranks, optim_spec, ragged_batch
from tests.full_disk import files_of_at_most
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full

LIMIT = 30  # seconds that a rank waits for the other
UPDATE = PolicyUpdate("ppo", PPOOptions(), "token-mean")
KINDS = {"whole": {}, "adapters": {"lora": LoRAFlags(lora_rank=4, target_modules=("q_proj",))}}


def rank_of_two(rank, port, checkpoint, root):
    init_distributed(rank, 2, "127.0.0.1", port, "cpu", timeout=LIMIT)
    batch = ragged_batch()
    plan = StepPlan([[0, 1], [2, 3]], counts_of(batch, 2))
    shard = batch.select([rank, rank + 2, rank + 4, rank + 6])
    for name, flags in KINDS.items():
        engine = build_engine(engine_spec(checkpoint, optim=optim_spec(), zero_stage=2, **flags))
        for write in (engine.export, engine.save):
            if rank == 0:
                with files_of_at_most(2_000), pytest.raises(Exception) as caught:
                    write(root / name)
                assert disk_is_full(caught.value), repr(caught.value)
            else:
                write(root / name)
            norms = [None, None]
            report = engine.train_step(shard, plan, UPDATE)
            dist.all_gather_object(norms, report["grad_norm"].value)
            assert norms[0] == norms[1] > 0, (name, write.__name__)
    close_distributed()


@pytest.mark.full
def test_a_full_disk_on_one_rank_holds_up_no_other(tmp_path):
    on_ranks(2, rank_of_two, tiny_model_dir(tmp_path), tmp_path)


class Worker:
    def __init__(self, context):
        self.rank, self.full = context.rank, False

    def fill(self, full):
        self.full = full and self.rank == 1

    def save(self, directory):
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        Path(directory, f"rank_{self.rank}").write_text("weights")

    def train(self, step):
        return step


def driver_of_two(rank, port, root):
    """Saves after steps 1 to 5 as a launcher's driver does. Rank 0 has no room for the second and
    the third, rank 1 none for the fourth."""
    launch = Launch(rank, 2, rank, "127.0.0.1", port)
    launch.join("cpu", LIMIT)
    group = LauncherGroup("model", launch)
    if rank:
        group.serve()
        return
    checkpoints = Checkpoints(CheckpointFlags(ckpt_path=str(root)), {})

    async def write(directory, parts):
        await group.call("save", str(directory))

    async def run():
        found = []
        await group.build(Worker)
        for step in range(1, 6):
            disk.free_bytes = lambda path, free=step != 2: 10**9 if free else 10
            await group.call("fill", step == 4)
            try:
                with files_of_at_most(2_000 if step == 3 else 10**6):
                    await checkpoints.save(step, {"text": "x" * 10_000}, write, write)
                found.append(step)
            except DiskFull:
                found.append(-step)
            assert await group.call("train", step) == [step, step]
        await group.close()
        return found

    assert asyncio.run(run()) == [1, -2, -3, -4, 5]


def test_all_ranks_of_a_launcher_know_that_one_of_them_has_no_room(tmp_path):
    on_ranks(2, driver_of_two, tmp_path)
    assert sorted(map(step_of, tmp_path.iterdir())) == [1, 5]
