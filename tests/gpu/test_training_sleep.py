"""Training state asleep on a GPU: its memory is free for others and comes back bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from openrl.experience import StepPlan
from openrl.models.process_memory import memory_use
from openrl.training_engine.build import build_engine
from openrl.training_engine.distributed import init_distributed
from openrl.training_engine.updates import SupervisedUpdate
from tests.contract.test_training_sleep import STATES, held
from tests.experience import counts_of, engine_spec, optim_spec, ragged_batch

GIB = 2**30


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_state_leaves_the_gpu(model_dir, record_property, stage):
    init_distributed(0, 1, "127.0.0.1", 0, "cuda", timeout=60)
    batch = ragged_batch()
    plan = StepPlan([[*range(8)]], counts_of(batch))
    spec = engine_spec(model_dir, zero_stage=stage, dtype="bf16", optim=optim_spec())
    engine = build_engine(replace(spec, device="cuda"))
    engine.train_step(batch, plan, SupervisedUpdate())
    # copies on the GPU would hold on to the segments that are to become free
    masters = [master.to("cpu", copy=True) for master in engine._masters.tensors()]
    parameters = [p.detach().to("cpu", copy=True) for p in engine.model.parameters()]
    awake, free = held(engine), memory_use("cuda").free
    engine.sleep("optim", "grad")
    without_states = memory_use("cuda").free
    engine.sleep("param")
    without_anything = memory_use("cuda").free
    record_property("GiB of optimizer states and gradients", (without_states - free) / GIB)
    record_property("GiB of parameters", (without_anything - without_states) / GIB)
    assert held(engine) == dict.fromkeys(STATES, 0)
    assert without_states - free > 0.95 * (awake["optim"] + awake["grad"])
    assert without_anything - without_states > 0.95 * awake["param"]
    engine.wake(*STATES)
    now = (master.cpu() for master in engine._masters.tensors())
    assert all(torch.equal(a, b) for a, b in zip(masters, now, strict=True))
    assert all(
        torch.equal(a, b.cpu()) for a, b in zip(parameters, engine.model.parameters(), strict=True)
    )
    engine.train_step(batch, plan, SupervisedUpdate())
