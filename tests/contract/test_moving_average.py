"""--enable_ema and the parts of a checkpoint: what is kept beside weights, what is exported, what a
resume takes up."""

import json

import pytest
import torch
from safetensors.torch import load_file

from openrl.config.teacher_plan import EarlierPolicy
from openrl.errors import UserError
from openrl.experience import StepPlan
from openrl.training_engine.build import build_engine
from openrl.training_engine.state import StateParts
from openrl.training_engine.updates import SupervisedUpdate
from tests.experience import column_of, counts_of, engine_spec, optim_spec

BETA = 0.75


pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_rank")]


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def step(engine, batch):
    return engine.train_step(
        batch, StepPlan([list(range(8))], counts_of(batch)), SupervisedUpdate()
    )


@pytest.mark.parametrize(
    ("stage", "flags"), [(0, {}), (2, {"adam_offload": True}), (3, {})], ids=str
)
def test_the_average_is_what_is_exported_and_goes_on_bit_for_bit(
    tmp_path, checkpoint, batch, stage, flags
):
    """0.75 * (0.75 * w0 + 0.25 * w1) + 0.25 * w2; the weights themselves are sent and trained as
    they were."""
    spec = engine_spec(checkpoint, zero_stage=stage, optim=optim_spec(average=BETA), **flags)
    engine = build_engine(spec)
    expected = weights(engine)
    for _ in range(2):
        step(engine, batch)
        expected = {
            name: BETA * expected[name] + (1 - BETA) * tensor
            for name, tensor in weights(engine).items()
        }
    before = weights(engine)
    engine.export(tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(
        torch.allclose(exported[name], tensor, rtol=0, atol=1e-6)
        for name, tensor in expected.items()
    )
    assert not all(
        torch.allclose(exported[name], tensor, rtol=0, atol=1e-3) for name, tensor in before.items()
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())

    engine.save(tmp_path / "state")
    resumed = build_engine(spec)
    resumed.load(tmp_path / "state")
    assert step(engine, batch) == step(resumed, batch)
    for number, one in enumerate((engine, resumed)):
        one.export(tmp_path / str(number))
    first, second = (load_file(tmp_path / str(number) / "model.safetensors") for number in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_skipped_step_leaves_the_average_as_it_is(tmp_path, checkpoint, batch):
    engine = build_engine(engine_spec(checkpoint, zero_stage=2, optim=optim_spec(average=BETA)))
    step(engine, batch)
    engine.save(tmp_path / "before")

    def poisoned(forward, micro, counts):
        return forward(micro)[0].sum() * torch.nan, {}

    engine.train_step(batch, StepPlan([list(range(8))], counts_of(batch)), poisoned)
    engine.save(tmp_path / "after")
    before, after = (
        load_file(tmp_path / when / "rank_00000.safetensors") for when in ("before", "after")
    )
    averages = [name for name in before if name.startswith("average.")]
    assert averages and all(torch.equal(before[name], after[name]) for name in averages)


def test_masters_that_slept_are_exported_as_before(tmp_path, checkpoint, batch):
    engine = build_engine(
        engine_spec(checkpoint, zero_stage=2, dtype="bf16", optim=optim_spec(average=BETA))
    )
    step(engine, batch)
    engine.export(tmp_path / "awake")
    engine.sleep("optim")
    with pytest.raises(RuntimeError, match="export needs optim"):
        engine.export(tmp_path / "asleep")
    engine.wake("optim")
    engine.export(tmp_path / "again")
    first, second = (
        load_file(tmp_path / when / "model.safetensors") for when in ("awake", "again")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert step(engine, batch)["nonfinite_steps"].value == 0


def test_an_average_cannot_join_halfway(tmp_path, checkpoint):
    build_engine(engine_spec(checkpoint, optim=optim_spec())).save(tmp_path)
    with pytest.raises(UserError, match="without --enable_ema, this run is with --enable_ema"):
        build_engine(engine_spec(checkpoint, optim=optim_spec(average=BETA))).load(tmp_path)
    values = tmp_path / "rank_00000.json"
    before = json.loads(values.read_text())
    del before["--teacher_self"]  # as an earlier version of openrl wrote it
    values.write_text(json.dumps(before))
    ema = engine_spec(checkpoint, optim=optim_spec(earlier=EarlierPolicy("ema", BETA)))
    with pytest.raises(UserError, match="without --teacher_self, this run is with --teacher_self"):
        build_engine(ema).load(tmp_path)


def test_one_earlier_policy_does_not_become_another(tmp_path, checkpoint):
    """The average of a run is no policy that it began with."""
    ema, start = (optim_spec(earlier=EarlierPolicy(*it)) for it in (("ema", BETA), ("start", 1.0)))
    build_engine(engine_spec(checkpoint, optim=ema)).save(tmp_path)
    with pytest.raises(
        UserError, match="--teacher_self ema, this run is with --teacher_self start"
    ):
        build_engine(engine_spec(checkpoint, optim=start)).load(tmp_path)


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_alone_start_the_optimizer_anew(tmp_path, checkpoint, batch, stage):
    """As a new engine over the weights that were saved: first step of Adam, first rate of the
    schedule."""
    spec = engine_spec(checkpoint, zero_stage=stage, optim=optim_spec(lr_scheduler="linear"))
    engine = build_engine(spec)
    step(engine, batch)
    small, whole = tmp_path / "small", tmp_path / "whole"
    engine.save(whole)
    engine.save(small, StateParts(optimizer=False, random=False))
    names = load_file(small / "rank_00000.safetensors").keys()
    assert {name.split(".")[0] for name in names} == {"master"}

    engine.export(tmp_path / "export")
    expected = build_engine(
        engine_spec(tmp_path / "export", zero_stage=stage, optim=optim_spec(lr_scheduler="linear"))
    )
    first = step(expected, batch)
    for directory in (small, whole):
        drawn = torch.get_rng_state()
        resumed = build_engine(spec)
        torch.set_rng_state(drawn)
        resumed.load(directory, StateParts(optimizer=False, random=False))
        assert torch.equal(torch.get_rng_state(), drawn)
        found = step(resumed, batch)
        assert found["lr"].value == first["lr"].value == pytest.approx(1e-2)
        again = weights(resumed)
        assert all(
            torch.allclose(again[n], t, rtol=0, atol=1e-6) for n, t in weights(expected).items()
        )


@pytest.mark.parametrize(
    ("missing", "flag"), [("optimizer", "--no_load_optim"), ("random", "--no_load_rng")]
)
def test_what_was_not_saved_is_not_loaded(tmp_path, checkpoint, missing, flag):
    engine = build_engine(engine_spec(checkpoint, optim=optim_spec()))
    engine.save(tmp_path, StateParts(**{missing: False}))
    with pytest.raises(UserError, match="was saved with --no_save_") as caught:
        engine.load(tmp_path)
    assert flag in caught.value.remedy


@pytest.mark.parametrize("stage, dtype", [(0, "fp32"), (2, "bf16"), (3, "fp32")], ids=str)
def test_an_earlier_self_answers_as_it_did(tmp_path, checkpoint, batch, stage, dtype):
    """It is the start until the engine is asked to remember. To evaluate it changes no weight, and a
    resume knows it."""
    rows = [list(range(8))]

    optim = optim_spec(earlier=EarlierPolicy("steps", 1.0))
    spec = engine_spec(checkpoint, zero_stage=stage, dtype=dtype, optim=optim)
    engine = build_engine(spec)
    start = column_of(engine, batch, rows)
    step(engine, batch)
    now, before = column_of(engine, batch, rows), weights(engine)
    assert torch.equal(engine.forward_earlier(batch, rows)["output"], start)
    assert not torch.allclose(now, start, atol=1e-3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())
    engine.remember()
    step(engine, batch)
    assert torch.equal(engine.forward_earlier(batch, rows)["output"], now)
    engine.save(tmp_path)
    resumed = build_engine(spec)
    resumed.load(tmp_path)
    assert torch.equal(resumed.forward_earlier(batch, rows)["output"], now)


def test_an_average_answers_for_the_policy(checkpoint, batch):
    """0.75 times the start and 0.25 times the weights after a step."""
    rows = [list(range(8))]
    engine = build_engine(
        engine_spec(checkpoint, optim=optim_spec(earlier=EarlierPolicy("ema", BETA)))
    )
    start = weights(engine)
    step(engine, batch)
    found, now = engine.forward_earlier(batch, rows)["output"], weights(engine)
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            name = name.removeprefix("hf.")
            parameter.copy_(BETA * start[name] + (1 - BETA) * now[name])
    torch.testing.assert_close(found, column_of(engine, batch, rows), rtol=0, atol=1e-5)
