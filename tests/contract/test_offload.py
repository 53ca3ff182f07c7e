"""Where DeepSpeed keeps things and in which type gradients add up, on one rank; on two in
tests/invariance."""

import re

import pytest
import torch
from safetensors.torch import load_file

from openrl.config.groups.deepspeed import DeepSpeedFlags
from openrl.errors import UserError
from openrl.experience import StepPlan
from openrl.training_engine.build import build_engine
from openrl.training_engine.deepspeed_config import check_overrides
from openrl.training_engine.updates import SupervisedUpdate
from tests.experience import counts_of, engine_spec, optim_spec, poison, ragged_batch

THIRDS = [[0, 1, 2], [3, 4], [5, 6, 7]]
OPTIM = optim_spec(max_norm=0.5)


pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_rank")]


@pytest.fixture(scope="module")
def batch():
    """Tokens whose gradients are all beyond fp32's rounding, which Adam magnifies where they are
    not: it divides by their size."""
    return ragged_batch(seed=1)


def steps(count, spec, batch):
    engine = build_engine(spec)
    plan = StepPlan(THIRDS, counts_of(batch))
    return engine, [
        engine.train_step(batch, plan, SupervisedUpdate())["grad_norm"].value for _ in range(count)
    ]


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def saved(engine, path):
    """The optimizer's fp32 weights and moments."""
    engine.save(path)
    return load_file(path / "rank_00000.safetensors")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("stage", "flags"),
    [
        (1, {"adam_offload": True}),
        (2, {"adam_offload": True}),
        (3, {"adam_offload": True, "param_offload": True}),
        (3, {"param_offload": True, "overlap_comm": False}),
        (1, {"overlap_comm": True}),
    ],
    ids=str,
)
def test_the_place_of_things_changes_no_number(tmp_path, checkpoint, batch, stage, flags, dtype):
    """Steps of three micro-batches, clipped; then a save, a resume and the weights for the
    engines. In bf16 one step, since a difference in the last bit of an fp32 weight may round it to
    the other neighbour in bf16, with which the next step begins."""
    count = {"fp32": 3, "bf16": 1}[dtype]
    plain, expected = steps(
        count, engine_spec(checkpoint, zero_stage=stage, dtype=dtype, optim=OPTIM), batch
    )
    spec = engine_spec(checkpoint, zero_stage=stage, dtype=dtype, optim=OPTIM, **flags)
    engine, norms = steps(count, spec, batch)
    assert norms == pytest.approx(expected, rel=1e-6)
    then, now = saved(plain, tmp_path / "plain"), saved(engine, tmp_path)
    assert then.keys() == now.keys()
    assert all(torch.allclose(now[name], then[name], rtol=0, atol=1e-6) for name in then)

    resumed = build_engine(spec)
    resumed.load(tmp_path)
    plan = StepPlan(THIRDS, counts_of(batch))
    assert engine.train_step(batch, plan, SupervisedUpdate()) == resumed.train_step(
        batch, plan, SupervisedUpdate()
    )
    again = weights(resumed)
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights(engine).items())


IN_FP32 = {"communication_data_type": "fp32"}


@pytest.mark.parametrize(("stage", "overrides"), [(0, IN_FP32), (1, IN_FP32), (2, {}), (3, {})])
def test_gradients_add_up_in_the_type_that_is_asked_for(
    tmp_path, checkpoint, batch, stage, overrides
):
    """Adam's first moment is (1 - beta1) times the sum of the micro-batches' gradients: in fp32 the
    sum of what each alone gives, in bf16 a rounded one. Stages 0 and 1 send the sum itself, in bf16
    unless an override says otherwise."""
    optim = optim_spec(max_norm=0.0)

    def gradient(micro_batches, dtype):
        flags = {"grad_accum_dtype": dtype, "ds_config_overrides": overrides}
        engine = build_engine(
            engine_spec(checkpoint, zero_stage=stage, dtype="bf16", optim=optim, **flags)
        )
        engine.train_step(batch, StepPlan(micro_batches, counts_of(batch)), SupervisedUpdate())
        engine.save(tmp_path)
        state = load_file(tmp_path / "rank_00000.safetensors")
        names = sorted(name for name in state if name.startswith("exp_avg."))
        return torch.cat([state[name].flatten() for name in names]).double() / (
            1 - optim.flags.adam_betas[0]
        )

    exact = sum(gradient([rows], None) for rows in THIRDS)
    assert float((gradient(THIRDS, None) - exact).norm() / exact.norm()) < 1e-6
    assert 1e-4 < float((gradient(THIRDS, "bf16") - exact).norm() / exact.norm()) < 1e-2


def test_nan_is_found_in_weights_on_the_host(checkpoint):
    engine = build_engine(engine_spec(checkpoint, zero_stage=3, optim=OPTIM, param_offload=True))
    poison(engine, "hf.model.layers.1.mlp.up_proj.weight")
    assert engine.nonfinite_weights() == ["model.layers.1.mlp.up_proj.weight"]


def overrides(**settings):
    return DeepSpeedFlags(ds_config_overrides=settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nosuch": 1}, "DeepSpeed has no setting 'nosuch'"),
        (
            {"wall_clock_brekdown": True},
            "no setting 'wall_clock_brekdown'; did you mean 'wall_clock_breakdown'",
        ),
        ({"flops_profiler": {"enabld": True}}, "'flops_profiler.enabld'; did you mean 'enabled'"),
        ({"zero_optimization": {"nosuch": 5}}, "nosuch: Extra inputs are not permitted"),
        ({"wall_clock_breakdown": "yes"}, "wall_clock_breakdown: expected true or false"),
        ({"gradient_predivide_factor": "x"}, "gradient_predivide_factor: expected a number"),
        ({"checkpoint": 4}, "checkpoint: expected a JSON object, got 4"),
        ({"elasticity": {"enabled": True}}, "Elastic training has been removed"),
        ({"communication_data_type": "bf8"}, "Invalid communication_data_type"),
    ],
)
def test_settings_that_deepspeed_would_refuse_or_ignore(settings, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check_overrides(overrides(**settings), "bf16", "cpu")


def test_settings_that_deepspeed_has():
    zero = {"reduce_bucket_size": 5e7, "stage3_max_live_parameters": 1e6}
    further = {"prescale_gradients": True, "communication_data_type": "fp32", "aio": {}}
    timers = {"timers": {"throughput": {"enabled": False}}, "steps_per_print": 5}
    check_overrides(overrides(zero_optimization=zero, **further, **timers), "bf16", "cpu")
