"""Layers with a state, in packed rows: each row gets what it gets alone, and nothing of another."""

import re

import pytest
import torch
from transformers import AutoConfig

from openrl.algorithms.policy_losses import PPOOptions
from openrl.config.groups.model import ModelFlags
from openrl.errors import UserError
from openrl.experience import StepPlan
from openrl.models.causal_lm import Loading, load_causal_lm
from openrl.models.small import write_small_model
from openrl.models.states import segmented_modules
from openrl.trainer.planning.certificate import Subject, adapters
from openrl.training_engine.build import build_engine
from openrl.training_engine.distributed import close_distributed, init_distributed
from openrl.training_engine.updates import PolicyUpdate
from tests.contract.test_train_engine import plain_logprobs
from tests.experience import (
    alike,
    column_of,
    counts_of,
    engine_spec,
    on_ranks,
    optim_spec,
    ragged_batch,
)
from tests.marks import full_after
from tests.patience import PATIENCE

SHAPES = {  # fields of a config that has attention among its first layers
    "qwen3_5_text": {},
    "falcon_h1": {},  # both in each layer
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "lfm2": {"full_attn_idxs": [1]},
    "minimax": {},
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "nemotron_h": {},
    "olmo_hybrid": {},
}
ROWS = [[3, 0, 1, -1, 6, 4], [5, 2, 7]]
GROUPS = (0, 0, 1, 0, 2, 1, 2, 1)
UPDATE = PolicyUpdate("ppo", PPOOptions(), "seq-mean-token-mean", entropy_coef=0.1)


@pytest.fixture(scope="module")
def one_of(tmp_path_factory):
    """Small models by their type, each made once."""
    made = {}

    def one_of(kind):
        if kind not in made:
            directory = tmp_path_factory.mktemp(kind)
            AutoConfig.for_model(kind, **SHAPES[kind]).save_pretrained(directory / "config")
            made[kind] = directory / "model"
            write_small_model(str(directory / "config"), made[kind], False)
        return made[kind]

    return one_of


def siblings():
    """Rows of three groups, which begin with four, three and six equal tokens."""
    return alike(ragged_batch(), GROUPS, (4, 3, 6))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", full_after(4, SHAPES))
@pytest.mark.parametrize("shares", [False, True])
def test_log_probs_are_those_of_rows_alone(one_of, kind, shares):
    engine = build_engine(engine_spec(one_of(kind), chunk_size=7, packing=True, shares=shares))
    assert segmented_modules(engine.model)
    found = column_of(engine, siblings(), ROWS)
    expected = plain_logprobs(one_of(kind), siblings())
    rows = sorted(row for rows in ROWS for row in rows if row >= 0)
    # fp32 has seven digits, of which values of ten and more need one before the point
    torch.testing.assert_close(found[rows], expected[rows], rtol=1e-6, atol=1e-5)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", full_after(1, SHAPES))
def test_training_is_that_of_padded_rows(one_of, kind):
    """The gradient too, with what the backward pass computes again, and by way of ZeRO 3."""
    plan, trained = StepPlan(ROWS, counts_of(siblings())), []
    for how in (
        {},
        {"packing": True},
        {"packing": True, "gradient_checkpointing": True, "zero_stage": 3},
        {"shares": True, "gradient_checkpointing": True},
    ):
        spec = engine_spec(one_of(kind), optim=optim_spec(learning_rate=1e-4), **how)
        engine = build_engine(spec)
        report = engine.train_step(siblings(), plan, UPDATE)
        trained.append({name: metric.value for name, metric in report.items()})
    for metrics in trained[1:]:
        assert metrics == pytest.approx(trained[0], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "falcon_h1"])
def test_another_row_changes_no_bit(one_of, kind):
    """Neither of what its neighbours get nor of their gradient."""
    flags = ModelFlags(pretrain=str(one_of(kind)), param_dtype="fp32")
    model = load_causal_lm(flags.pretrain, Loading(flags, "cpu", packing=True), 1.0, 7)
    batch, found = ragged_batch(), []
    for first in (batch.token_ids[0], batch.token_ids[0].flip(0)):
        ids = torch.cat([first[None], batch.token_ids[1:3]])
        model.zero_grad()
        logprobs, _ = model(ids, batch.attention_mask[:3])
        logprobs[1:].sum().backward()
        found.append((logprobs.detach(), [p.grad.clone() for p in model.parameters()]))
    (one, of_one), (other, of_other) = found
    assert not torch.equal(one[0], other[0])
    assert torch.equal(one[1:], other[1:])
    assert all(torch.equal(a, b) for a, b in zip(of_one, of_other, strict=True))
    assert any(grad.any() for grad in of_one)


@pytest.mark.usefixtures("one_rank")
def test_a_state_in_no_known_place_is_refused(tmp_path, one_of, monkeypatch):
    monkeypatch.setattr("openrl.models.states._carries_state", lambda module: False)
    with pytest.raises(UserError, match="the state of its Lfm2DecoderLayer is not in one known"):
        build_engine(engine_spec(one_of("lfm2"), packing=True))


@pytest.mark.parametrize("kind", ["falcon_h1", "jamba", "bamba"])
def test_adapters_on_all_linear_layers_leave_out_what_kernels_of_mamba_read(one_of, kind):
    """As peft demands of Falcon-H1. Each adapter that there is learns."""
    subject = Subject(ModelFlags(pretrain=str(one_of(kind)), param_dtype="fp32"), "cpu", "hf")
    assert not {"out_proj", "dt_proj"} & set(re.split("[:, ]+", adapters(subject)))


def rank_of_two(rank, port, checkpoint, root):
    """One rank packs five rows into a row and the other two: it runs the state's part more often."""
    init_distributed(rank, 2, "127.0.0.1", port, "cpu", timeout=PATIENCE)
    rows = [[0, 1, 2, 3, 4], [5, 6]][rank]
    batch = ragged_batch()
    plan = StepPlan([list(range(len(rows)))], counts_of(batch.select(range(7)), 2))
    for stage in (2, 3):
        spec = engine_spec(
            checkpoint, zero_stage=stage, optim=optim_spec(learning_rate=1e-4), packing=True
        )
        norm = build_engine(spec).train_step(batch.select(rows), plan, UPDATE)["grad_norm"].value
        torch.save(norm, root / f"{stage}-{rank}.pt")
    close_distributed()


@pytest.mark.full
@pytest.mark.usefixtures("one_rank")
def test_ranks_that_pack_different_numbers_of_rows(tmp_path, one_of):
    on_ranks(2, rank_of_two, one_of("qwen3_5_text"), tmp_path)
    batch = ragged_batch().select(range(7))
    spec = engine_spec(one_of("qwen3_5_text"), optim=optim_spec(learning_rate=1e-4))
    plan = StepPlan([list(range(7))], counts_of(batch))
    norm = build_engine(spec).train_step(batch, plan, UPDATE)["grad_norm"].value
    for stage in (2, 3):
        for rank in (0, 1):
            found = torch.load(tmp_path / f"{stage}-{rank}.pt", weights_only=True)
            assert found == pytest.approx(norm, rel=1e-5)
