"""A model that sleeps between any two calls ends bit for bit where one that never slept does."""

from dataclasses import replace

import psutil
import pytest
import torch
from safetensors.torch import load_file

from openrl.config.groups.lora import LoRAFlags
from openrl.experience import StepPlan
from openrl.training_engine.build import build_engine
from openrl.training_engine.distributed import init_distributed
from openrl.training_engine.sleep import gradient_tensors, parameter_tensors
from openrl.training_engine.updates import SupervisedUpdate
from tests.experience import column_of, counts_of, engine_spec, optim_spec, ragged_batch
from tests.patience import PATIENCE
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full


STATES = ("param", "optim", "grad")
KINDS = [
    *((stage, dtype, "adamw") for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16")),
    *((stage, "bf16", "adamw_bf16") for stage in (0, 2, 3)),
    (2, "fp32", "adamw_8bit"),
    (0, "bf16", "muon"),
]


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    init_distributed(0, 1, "127.0.0.1", 0, "cpu", timeout=PATIENCE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("models"))


def build(path, stage=0, dtype="fp32", optimizer="adamw", lora=None):
    return build_engine(
        engine_spec(
            path, zero_stage=stage, dtype=dtype, optim=optim_spec(optimizer=optimizer), lora=lora
        )
    )


def held(engine):
    """Bytes of each part that are in memory now, by the tensors' own storages."""
    states = [
        v
        for state in engine._inner.state.values()
        for v in state.values()
        if isinstance(v, torch.Tensor)
    ]
    parts = {
        "param": parameter_tensors(engine.model),
        "optim": [*engine._masters.tensors(), *states],
        "grad": gradient_tensors(
            [*engine.model.parameters(), *engine._masters.tensors()], engine._engine.optimizer
        ),
    }
    return {
        part: sum(t.untyped_storage().nbytes() for t in tensors) for part, tensors in parts.items()
    }


def nap(engine, *parts):
    engine.sleep(*parts)
    engine.wake(*parts)


@pytest.mark.parametrize(("stage", "dtype", "optimizer"), KINDS)
def test_sleep_between_calls_changes_no_bit(tmp_path, checkpoint, stage, dtype, optimizer):
    batch = ragged_batch()
    rows = [[0, 1, 2, 3], [4, 5, 6, 7]]
    results = []
    for sleeps in (False, True):
        engine = build(checkpoint, stage, dtype, optimizer)
        columns = []
        for _ in range(3):
            if sleeps:
                nap(engine, *STATES)
            engine.train_step(batch, StepPlan(rows, counts_of(batch)), SupervisedUpdate())
            if sleeps:
                nap(engine, "grad", "optim")
                engine.sleep(*STATES)
                engine.wake("param")
            columns.append(column_of(engine, batch, rows))
            if sleeps:
                engine.wake("optim", "grad")
        engine.save(tmp_path / str(sleeps))
        weights = {name: tensor.clone() for name, tensor in engine.named_weights()}
        results.append(
            (columns, weights, load_file(tmp_path / str(sleeps) / "rank_00000.safetensors"))
        )
    (columns, weights, state), (columns_2, weights_2, state_2) = results
    assert all(torch.equal(a, b) for a, b in zip(columns, columns_2, strict=True))
    assert weights.keys() == weights_2.keys() and all(
        torch.equal(w, weights_2[n]) for n, w in weights.items()
    )
    assert state.keys() == state_2.keys() and all(
        torch.equal(t, state_2[n]) for n, t in state.items()
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sleep_frees_what_it_says(checkpoint, stage):
    batch = ragged_batch()
    engine = build(checkpoint, stage, "bf16")
    engine.train_step(batch, StepPlan([[*range(8)]], counts_of(batch)), SupervisedUpdate())
    awake = held(engine)
    count = engine.parameter_count()
    assert awake["param"] >= 2 * count and awake["optim"] >= 12 * count
    # the others free their gradients after each step
    assert (awake["grad"] > 0) == (stage in (1, 3))
    engine.sleep("optim", "grad")
    assert held(engine) == {"param": awake["param"], "optim": 0, "grad": 0}
    engine.sleep("param")
    assert held(engine) == dict.fromkeys(STATES, 0)
    engine.wake(*STATES)
    assert held(engine) == awake


def test_weights_that_are_their_own_masters_stay_with_the_parameters(checkpoint):
    """Stage 0 in fp32: the optimizer steps on the parameters, which a forward pass needs."""
    batch = ragged_batch()
    engine = build(checkpoint)
    engine.train_step(batch, StepPlan([[*range(8)]], counts_of(batch)), SupervisedUpdate())
    before = column_of(engine, batch, [[*range(8)]])
    engine.sleep("optim", "grad")
    assert torch.equal(column_of(engine, batch, [[*range(8)]]), before)


def test_adapters_and_a_frozen_base_sleep_too(checkpoint):
    batch = ragged_batch()
    engine = build(checkpoint, 2, "bf16", lora=LoRAFlags(lora_rank=4))
    plan = StepPlan([[*range(8)]], counts_of(batch))
    engine.train_step(batch, plan, SupervisedUpdate())
    before = (
        column_of(engine, batch, [[*range(8)]]),
        column_of(engine, batch, [[*range(8)]], as_reference=True),
    )
    engine.sleep(*STATES)
    assert held(engine) == dict.fromkeys(STATES, 0)
    engine.wake(*STATES)
    after = (
        column_of(engine, batch, [[*range(8)]]),
        column_of(engine, batch, [[*range(8)]], as_reference=True),
    )
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_without_an_optimizer_sleeps(checkpoint, stage):
    batch = ragged_batch()
    engine = build_engine(engine_spec(checkpoint, zero_stage=stage))
    before = column_of(engine, batch, [[*range(8)]])
    engine.sleep("param")
    # without shards and optimizer the weights are still the mapped file that they came from
    if stage == 3:
        assert sum(t.untyped_storage().nbytes() for t in parameter_tensors(engine.model)) == 0
    with pytest.raises(RuntimeError, match="forward needs param of this model, asleep now"):
        column_of(engine, batch, [[*range(8)]])
    engine.wake("param")
    assert torch.equal(column_of(engine, batch, [[*range(8)]]), before)


def test_a_streamed_model_keeps_nothing_between_passes(checkpoint):
    """--ref_reward_offload with ZeRO 3: DeepSpeed fetches layer by layer, and the answers are those
    of a whole model."""
    batch = ragged_batch()
    expected = column_of(build_engine(engine_spec(checkpoint)), batch, [[*range(8)]])
    engine = build_engine(replace(engine_spec(checkpoint, zero_stage=3), streamed=True))
    for _ in range(2):
        torch.testing.assert_close(
            column_of(engine, batch, [[*range(8)]]), expected, rtol=0, atol=1e-5
        )
        matrices = [p for p in engine.model.parameters() if p.ds_shape.numel() > 640]
        assert matrices and all(
            p.numel() == 0 and p.ds_tensor.device.type == "cpu" for p in matrices
        )


def test_what_needs_a_sleeping_part_is_refused(tmp_path, checkpoint):
    batch = ragged_batch()
    engine = build(checkpoint, 2)
    plan = StepPlan([[*range(8)]], counts_of(batch))
    engine.sleep("grad")
    with pytest.raises(RuntimeError, match="train_in_pieces needs grad of this model"):
        engine.train_step(batch, plan, SupervisedUpdate())
    engine.sleep("optim")
    with pytest.raises(RuntimeError, match="train_in_pieces needs optim and grad"):
        engine.train_step(batch, plan, SupervisedUpdate())
    for refused in (engine.save, engine.load, engine.export):
        with pytest.raises(RuntimeError, match="needs optim"):
            refused(tmp_path)
    column_of(engine, batch, [[*range(8)]])
    engine.sleep("param")
    for refused in (engine.named_weights, engine.nonfinite_weights):
        with pytest.raises(RuntimeError, match="needs param"):
            refused()
    with pytest.raises(RuntimeError, match="asleep now"):
        engine.sleep("param")
    engine.wake(*STATES)
    with pytest.raises(RuntimeError, match="param of this model is awake already"):
        engine.wake("param")
    engine.train_step(batch, plan, SupervisedUpdate())


def test_on_a_cpu_the_process_gets_smaller(tmp_path):
    """A model of 8.5 million parameters: 102 MB of masters and moments beside weights of 17 MB."""
    path = tiny_model_dir(
        tmp_path, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, head_dim=64
    )
    batch = ragged_batch()
    engine = build(path, 2, "bf16")
    engine.train_step(batch, StepPlan([[*range(8)]], counts_of(batch)), SupervisedUpdate())
    size, awake = 12 * engine.parameter_count(), psutil.Process().memory_info().rss
    engine.sleep("optim", "grad")
    freed = awake - psutil.Process().memory_info().rss
    assert freed > 0.75 * size > 5e7  # more than the moments alone, which are two thirds
    engine.wake("optim", "grad")
    engine.train_step(batch, StepPlan([[*range(8)]], counts_of(batch)), SupervisedUpdate())
