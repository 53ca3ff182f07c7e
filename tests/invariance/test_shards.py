"""ZeRO 3 divides a model while it loads: what each rank holds before DeepSpeed's engine is built."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from openrl.config.groups.deepspeed import DeepSpeedFlags
from openrl.training_engine.build import load_model
from openrl.training_engine.deepspeed_config import EngineFacts, deepspeed_config
from openrl.training_engine.deepspeed_engine import shard
from openrl.training_engine.distributed import close_distributed, init_distributed
from tests.experience import engine_spec, on_ranks
from tests.patience import PATIENCE
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full


def rank_of_two(rank, port, checkpoint):
    os.environ["LOCAL_RANK"] = "0"
    init_distributed(rank, 2, "127.0.0.1", port, "cpu", timeout=PATIENCE)
    flags = DeepSpeedFlags(zero_stage=3)
    model = load_model(replace(engine_spec(checkpoint, zero_stage=3), deepspeed=flags))
    whole = sum(p.numel() for p in model.parameters())
    if rank == 1:  # what counts is what rank 0 has loaded
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    facts = EngineFacts(whole, 0, "fp32", "cpu", ranks=2, trained=False)  # 0: no vector stays whole
    shard(model, deepspeed_config(flags, facts), torch.float32)

    parts = [p.ds_tensor for p in model.parameters()]
    assert not any(p.numel() for p in model.parameters())
    assert abs(sum(part.numel() for part in parts) - whole / 2) <= len(parts)
    assert any(part.abs().sum() > 0 for part in parts)
    halves = torch.tensor([float(sum(part.double().abs().sum() for part in parts))])
    dist.all_reduce(halves)
    whole_again = load_model(engine_spec(checkpoint))
    expected = sum(p.double().abs().sum() for p in whole_again.parameters())
    torch.testing.assert_close(halves.double()[0], expected.detach(), rtol=1e-5, atol=0)
    close_distributed()


def test_each_rank_holds_its_half(tmp_path):
    on_ranks(2, rank_of_two, tiny_model_dir(tmp_path))
