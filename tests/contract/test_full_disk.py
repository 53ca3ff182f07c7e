"""A disk that is full on one of two ranks: the other one does not wait for it, and both train on."""

from __future__ import annotations

import resource
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from openrl.algorithms.policy_losses import PPOOptions
from openrl.config.groups.lora import LoRAFlags
from openrl.experience import StepPlan
from openrl.trainer.saving.disk import disk_is_full
from openrl.training.build import build_engine
from openrl.training.distributed import close_distributed, init_distributed
from openrl.training.updates import PolicyUpdate
from tests.experience import counts_of, engine_spec, on_ranks, optim_spec, ragged_batch
from tests.tiny import tiny_model_dir

LIMIT = 30  # seconds that a rank waits for the other
UPDATE = PolicyUpdate("ppo", PPOOptions(), "token-mean")
KINDS = {"whole": {}, "adapters": {"lora": LoRAFlags(lora_rank=4, target_modules=("q_proj",))}}


@contextmanager
def files_of_at_most(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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


def test_a_full_disk_on_one_rank_holds_up_no_other(tmp_path):
    on_ranks(2, rank_of_two, tiny_model_dir(tmp_path), tmp_path)
