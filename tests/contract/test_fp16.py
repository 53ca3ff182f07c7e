"""Training in fp16, with DeepSpeed's dynamic loss scale: norms are those of fp32, an overflow costs
a step and lowers the scale, and a resume goes on bit for bit.

Few CPUs have arithmetic in fp16; DeepSpeed is told that this one has, and torch computes it all the
same."""

from __future__ import annotations

import pytest
import torch

from openrl.experience import StepPlan
from openrl.training_engine.build import build_engine
from openrl.training_engine.distributed import init_distributed
from openrl.training_engine.updates import SupervisedUpdate
from tests.experience import counts_of, engine_spec, optim_spec, ragged_batch
from tests.patience import PATIENCE
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full

ROWS = [[0, 1, 2, 3], [4, 5, 6, 7]]
# a scale of 256, which one overflow halves
FP16 = {"fp16": {"initial_scale_power": 8, "hysteresis": 1}}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    init_distributed(0, 1, "127.0.0.1", 0, "cpu", timeout=PATIENCE)


@pytest.fixture(autouse=True)
def a_cpu_with_fp16(one_rank, monkeypatch):
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator  # after the device is settled

    monkeypatch.setattr(CPU_Accelerator, "is_fp16_supported", lambda self: True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), initializer_range=0.02)


def step(engine, batch):
    return {
        name: m.value
        for name, m in engine.train_step(batch, plan_of(batch), SupervisedUpdate()).items()
    }


def plan_of(batch):
    return StepPlan(ROWS, counts_of(batch))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_norms_are_unscaled_and_a_resume_goes_on(tmp_path, checkpoint, stage):
    batch = ragged_batch()
    exact = step(build_engine(engine_spec(checkpoint, optim=optim_spec())), batch)
    spec = engine_spec(
        checkpoint, zero_stage=stage, dtype="fp16", optim=optim_spec(), ds_config_overrides=FP16
    )
    engine = build_engine(spec)
    first = step(engine, batch)
    assert first["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.02)
    assert (first["loss_scale_skips"], first["nonfinite_steps"]) == (0, 0)

    engine.save(tmp_path)
    resumed = build_engine(spec)
    resumed.load(tmp_path)
    assert step(engine, batch) == step(resumed, batch)
    then, now = (dict(e.named_weights()) for e in (engine, resumed))
    assert all(torch.equal(then[name], now[name]) for name in then)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_overflow_costs_a_step_and_halves_the_scale(tmp_path, checkpoint, stage):
    batch = ragged_batch()
    spec = engine_spec(
        checkpoint, zero_stage=stage, dtype="fp16", optim=optim_spec(), ds_config_overrides=FP16
    )
    engine = build_engine(spec)
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}

    def far_too_large(forward, rows, counts):
        loss, metrics = SupervisedUpdate()(forward, rows, counts)
        return loss * 1e9, metrics

    metrics = {
        n: m.value for n, m in engine.train_step(batch, plan_of(batch), far_too_large).items()
    }
    assert (metrics["loss_scale_skips"], metrics["nonfinite_steps"]) == (
        1,
        0,
    ) and "grad_norm" not in metrics
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_weights())
    engine.save(tmp_path)
    resumed = build_engine(spec)
    resumed.load(tmp_path)
    assert [e._masters.loss_scale()["cur_scale"] for e in (engine, resumed)] == [128, 128]
    assert step(engine, batch) == step(resumed, batch)
