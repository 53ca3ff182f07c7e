"""What every training engine must do, on one rank: held against plain transformers and plain
AdamW."""

import json
import math
import os

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrl.algorithms.batching import plan_pairs
from openrl.algorithms.off_policy import correct_rollouts, mismatch_figures
from openrl.algorithms.policy_losses import PPOOptions
from openrl.cluster.group import WorkerContext
from openrl.config.groups.rollout_correction import RolloutCorrectionFlags
from openrl.errors import UserError
from openrl.experience import StepCounts, StepPlan
from openrl.models.experts import check_mixture
from openrl.training_engine.build import build_engine
from openrl.training_engine.distributed import init_distributed
from openrl.training_engine.optimizers import build_optimizer, build_scheduler
from openrl.training_engine.preference_updates import PairRewardUpdate
from openrl.training_engine.sleep import parameter_tensors
from openrl.training_engine.state import StateParts
from openrl.training_engine.updates import (
    COMPARED,
    PolicyUpdate,
    SupervisedUpdate,
    ValueUpdate,
    balanced,
)
from openrl.training_engine.whole_weights import deepspeed_module
from openrl.weights.transport import Route
from openrl.workers.model_worker import ModelWorker
from tests.experience import (
    alike,
    column_of,
    counts_of,
    engine_spec,
    optim_spec,
    poison,
    ragged_batch,
)
from tests.invariance.test_preferences import batch_of_pairs
from tests.patience import PATIENCE
from tests.tiny import tiny_model_dir

STAGES = (0, 1, 2, 3)
ARCHITECTURES = {
    "qwen3": {},
    "llama": {},
    "qwen3_moe": {},
    "gemma2": {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 32},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
}


pytestmark = pytest.mark.usefixtures("one_rank")


def plain_logprobs(path, batch, temperature=1.0, attention=None):
    """Of the trained tokens, row by row without padding, from the model's own logits."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention)
    column = torch.zeros(batch.token_ids.shape)
    for row, length in enumerate(batch.lengths.tolist()):
        ids = batch.token_ids[row : row + 1, :length]
        with torch.no_grad():
            scores = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
        column[row, 1:length] = scores.gather(-1, ids[0, 1:, None])[:, 0]
    return column * batch.loss_mask


def halves(batch):
    rows = list(range(len(batch)))
    return [rows[::2], rows[1::2]]


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_forward_equals_the_models_own(tmp_path, batch, arch, tied):
    path = tiny_model_dir(tmp_path, tied=tied, arch=arch, **ARCHITECTURES[arch])
    engine = build_engine(engine_spec(path, temperature=0.7, chunk_size=5))
    found = column_of(engine, batch, [*halves(batch), [-1, -1]])
    torch.testing.assert_close(found, plain_logprobs(path, batch, 0.7), rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_forward_is_the_same_in_every_stage(checkpoint, batch, stage):
    for optim in (None, optim_spec()):
        engine = build_engine(engine_spec(checkpoint, zero_stage=stage, optim=optim))
        found = column_of(engine, batch, halves(batch))
        torch.testing.assert_close(found, plain_logprobs(checkpoint, batch), rtol=0, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optim", [None, optim_spec()], ids=["evaluated", "trained"])
def test_a_closed_engine_leaves_nothing_in_memory(checkpoint, batch, stage, optim):
    """The next model in the process needs the room of the last one, also while something still
    refers to that."""
    engine = build_engine(engine_spec(checkpoint, zero_stage=stage, dtype="bf16", optim=optim))
    tensors = parameter_tensors(engine.model)
    if optim:
        engine.train_step(batch, StepPlan([[*range(8)]], counts_of(batch)), SupervisedUpdate())
        states = (v for state in engine._inner.state.values() for v in state.values())
        tensors += [*engine._masters.tensors(), *filter(torch.is_tensor, states)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    assert sum(storage.nbytes() for storage in storages) > 100_000
    engine.close()
    assert not sum(storage.nbytes() for storage in storages)


def test_a_jobs_variables_tell_of_other_processes(monkeypatch, checkpoint, batch):
    """A worker of Ray inherits those of the process that started the command, on a cluster those of
    its node. DeepSpeed would take them for its own: the GPU by its number, the ranks by theirs."""
    for name, value in {"LOCAL_RANK": "3", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    init_distributed(0, 1, "127.0.0.1", 0, "cpu", timeout=PATIENCE)
    engine = build_engine(engine_spec(checkpoint, zero_stage=3))
    assert os.environ["LOCAL_RANK"] == "0"
    found = column_of(engine, batch, halves(batch))
    torch.testing.assert_close(found, plain_logprobs(checkpoint, batch), rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_steps_equal_plain_adamw(checkpoint, batch, stage, max_norm):
    spec = optim_spec(max_norm=max_norm)
    engine = build_engine(
        engine_spec(checkpoint, zero_stage=stage, optim=spec, gradient_checkpointing=stage != 1)
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    optimizer = build_optimizer(model, spec)
    schedule = build_scheduler(optimizer, spec)
    mask = batch.loss_mask[:, 1:]
    for _ in range(3):
        scores = model(input_ids=batch.token_ids).logits[:, :-1].log_softmax(-1)
        loss = -scores.gather(-1, batch.token_ids[:, 1:, None])[..., 0][mask].mean()
        optimizer.zero_grad()
        loss.backward()
        norm = float(clip_grad_norm_(model.parameters(), max_norm or math.inf))
        rate = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        metrics = engine.train_step(
            batch, StepPlan(halves(batch), counts_of(batch)), SupervisedUpdate()
        )
        assert metrics["loss"].value == pytest.approx(float(loss.detach()), rel=1e-5)
        assert metrics["grad_norm"].value == pytest.approx(norm, rel=1e-4)
        assert metrics["lr"].value == pytest.approx(rate)
        assert metrics["nonfinite_steps"].value == 0
    expected = model.state_dict()
    for name, found in engine.named_weights():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_first_step_of_adam_moves_masters_by_the_learning_rate(
    tmp_path, checkpoint, batch, stage, dtype
):
    """Bias correction makes the first update lr * g / |g|, whatever the gradient's size and
    type."""
    spec = optim_spec(learning_rate=1e-3, l2=0.0)
    engine = build_engine(engine_spec(checkpoint, zero_stage=stage, dtype=dtype, optim=spec))
    engine.save(tmp_path / "before")
    engine.train_step(batch, StepPlan(halves(batch), counts_of(batch)), SupervisedUpdate())
    engine.save(tmp_path / "after")
    before, after = (
        load_file(tmp_path / when / "rank_00000.safetensors") for when in ("before", "after")
    )
    moved = torch.cat(
        [(after[n] - before[n]).abs().flatten() for n in before if n.startswith("master.")]
    )
    assert float(moved.max()) == pytest.approx(1e-3, rel=1e-3)
    # the rest: padding and characters that do not occur
    assert float((moved > 0.99e-3).float().mean()) > 0.8


OPTIMIZERS = [
    *(("adamw_bf16", stage, "bf16") for stage in STAGES),
    *(("adamw_8bit", stage, dtype) for stage in STAGES for dtype in ("fp32", "bf16")),
    *(("muon", 0, dtype) for dtype in ("fp32", "bf16")),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "stage", "dtype"), OPTIMIZERS)
def test_other_optimizers_learn_and_resume_bit_for_bit(
    tmp_path, checkpoint, batch, name, stage, dtype
):
    optim = optim_spec(optimizer=name, learning_rate=3e-3)
    spec = engine_spec(checkpoint, zero_stage=stage, dtype=dtype, optim=optim)
    plan = StepPlan(halves(batch), counts_of(batch))
    engine = build_engine(spec)
    losses = [engine.train_step(batch, plan, SupervisedUpdate())["loss"].value for _ in range(6)]
    assert losses[-1] < losses[0] - 0.2
    engine.save(tmp_path)
    expected = engine.train_step(batch, plan, SupervisedUpdate())
    resumed = build_engine(spec)
    resumed.load(tmp_path)
    assert resumed.train_step(batch, plan, SupervisedUpdate()) == expected
    for (key, before), (_, after) in zip(
        engine.named_weights(), resumed.named_weights(), strict=True
    ):
        assert torch.equal(before, after), key


@pytest.mark.parametrize("stage", STAGES)
def test_adamw_bf16_keeps_nothing_in_fp32_and_starts_with_step_one(
    tmp_path, checkpoint, batch, stage
):
    """Weight and compensation together move by the learning rate, as the masters of Adam do."""
    optim = optim_spec(optimizer="adamw_bf16", learning_rate=1e-3, l2=0.0)
    engine = build_engine(engine_spec(checkpoint, zero_stage=stage, dtype="bf16", optim=optim))
    engine.save(tmp_path / "before")
    engine.train_step(batch, StepPlan(halves(batch), counts_of(batch)), SupervisedUpdate())
    engine.save(tmp_path / "after")
    before, after = (
        load_file(tmp_path / when / "rank_00000.safetensors") for when in ("before", "after")
    )
    floats = {name: t.dtype for name, t in after.items() if t.is_floating_point()}
    assert set(floats.values()) == {torch.bfloat16}, floats
    assert {int(t) for name, t in after.items() if name.startswith("step.")} == {1}
    names = [name for name in before if name.startswith("master.")]
    now = {
        name: after[name].float() + after[name.replace("master", "compensation")].float()
        for name in names
    }
    moved = torch.cat([(now[name] - before[name].float()).abs().flatten() for name in names])
    assert float(moved.max()) == pytest.approx(1e-3, rel=0.02)
    assert float((moved > 0.98e-3).float().mean()) > 0.8


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_engine_goes_on_bit_for_bit(tmp_path, checkpoint, batch, stage, dtype):
    spec = engine_spec(checkpoint, zero_stage=stage, dtype=dtype, optim=optim_spec())
    plan = StepPlan(halves(batch), counts_of(batch))
    engine = build_engine(spec)
    engine.train_step(batch, plan, SupervisedUpdate())
    engine.train_step(batch, plan, SupervisedUpdate())
    engine.save(tmp_path)
    drawn = torch.rand(3)
    expected = engine.train_step(batch, plan, SupervisedUpdate())

    resumed = build_engine(spec)
    resumed.load(tmp_path)
    assert torch.equal(torch.rand(3), drawn)
    assert resumed.train_step(batch, plan, SupervisedUpdate()) == expected
    for (name, before), (other, after) in zip(
        engine.named_weights(), resumed.named_weights(), strict=True
    ):
        assert name == other and torch.equal(before, after), name


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_going_back_to_a_save_forgets_what_came_after(tmp_path, checkpoint, batch, stage, dtype):
    engine = build_engine(
        engine_spec(checkpoint, zero_stage=stage, dtype=dtype, optim=optim_spec())
    )
    plan = StepPlan(halves(batch), counts_of(batch))
    engine.save(tmp_path)  # before the first step: the optimizer has no state
    twice = []
    for _ in range(2):
        engine.load(tmp_path)
        engine.train_step(batch, plan, SupervisedUpdate())
        engine.train_step(batch, plan, SupervisedUpdate())
        twice.append({name: t.clone() for name, t in engine.named_weights()})
    assert all(torch.equal(twice[0][name], twice[1][name]) for name in twice[0])


@pytest.mark.parametrize("stage", STAGES)
def test_communication_buffers_are_no_larger_than_the_gradients(checkpoint, batch, stage):
    """DeepSpeed's default sets 500 million elements aside for the smallest of models: a gigabyte or
    two of a GPU."""
    engine = build_engine(
        engine_spec(checkpoint, zero_stage=stage, dtype="bf16", optim=optim_spec())
    )
    before = psutil.Process().memory_info().vms
    engine.train_step(batch, StepPlan(halves(batch), counts_of(batch)), SupervisedUpdate())
    assert psutil.Process().memory_info().vms - before < 5e8


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "other"), [(0, 1), (1, 3), (2, 0), (3, 2)])
def test_a_state_of_another_stage_goes_on(tmp_path, checkpoint, batch, stage, other, dtype):
    """With moments, their step counts, schedule and moving average; two ranks are in
    tests/invariance/test_ranks.py."""
    plan = StepPlan(halves(batch), counts_of(batch))
    optim = optim_spec(learning_rate=1e-3, average=0.5)
    saving, resumed = (
        build_engine(engine_spec(checkpoint, zero_stage=one, dtype=dtype, optim=optim))
        for one in (stage, other)
    )
    saving.train_step(batch, plan, SupervisedUpdate())
    saving.save(tmp_path)
    resumed.load(tmp_path)
    after = [engine.train_step(batch, plan, SupervisedUpdate()) for engine in (saving, resumed)]
    assert after[0]["lr"] == after[1]["lr"]
    assert after[0]["loss"].value == pytest.approx(after[1]["loss"].value, rel=1e-6)
    for engine, name in ((saving, "saving"), (resumed, "resumed")):
        engine.export(tmp_path / name)  # the average
    expected, found = (
        load_file(tmp_path / name / "model.safetensors") for name in ("saving", "resumed")
    )
    gaps = torch.cat([(expected[n] - found[n]).abs().flatten() for n in expected])
    assert float((gaps > 1e-6).float().mean()) <= (0 if dtype == "fp32" else 0.01)


def test_masters_with_different_moments_go_on_with_other_ranks(tmp_path, checkpoint, batch):
    """Muon's matrices have one moment, the other parameters Adam's two."""
    plan = StepPlan(halves(batch), counts_of(batch))
    spec = engine_spec(checkpoint, optim=optim_spec(optimizer="muon"))
    saving, resumed = build_engine(spec), build_engine(spec)
    saving.train_step(batch, plan, SupervisedUpdate())
    saving.save(tmp_path)
    values = tmp_path / "rank_00000.json"  # in stage 0 every rank has all
    values.write_text(json.dumps(json.loads(values.read_text()) | {"ranks": 2}))
    resumed.load(tmp_path)
    for engine in (saving, resumed):
        engine.train_step(batch, plan, SupervisedUpdate())
    for (name, a), (_, b) in zip(saving.named_weights(), resumed.named_weights(), strict=True):
        assert torch.equal(a, b), name


def test_a_state_that_cannot_be_cut_anew_is_refused(tmp_path, checkpoint, batch):
    plan = StepPlan(halves(batch), counts_of(batch))
    blocks = optim_spec(optimizer="adamw_8bit")
    saving = build_engine(engine_spec(checkpoint, zero_stage=1, optim=blocks))
    saving.train_step(batch, plan, SupervisedUpdate())
    saving.save(tmp_path)
    resumed = build_engine(engine_spec(checkpoint, zero_stage=3, optim=blocks))
    with pytest.raises(UserError, match="has no value for each element") as caught:
        resumed.load(tmp_path)
    assert "--no_load_optim" in caught.value.remedy
    resumed.load(tmp_path, StateParts(optimizer=False, random=True))
    for (name, a), (_, b) in zip(saving.named_weights(), resumed.named_weights(), strict=True):
        assert torch.equal(a, b), name
    with pytest.raises(UserError, match="--param_dtype fp32, this run is with --param_dtype bf16"):
        build_engine(engine_spec(checkpoint, dtype="bf16", optim=blocks)).load(tmp_path)
    values = tmp_path / "rank_00000.json"
    text = json.loads(values.read_text())
    values.write_text(json.dumps(text | {"fragments": text["fragments"][1:]}))
    with pytest.raises(UserError, match=r"lacks \d+ elements"):
        resumed.load(tmp_path, StateParts(optimizer=False, random=True))


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "optimizer"), [("fp32", "adamw"), ("bf16", "adamw"), ("bf16", "adamw_bf16")]
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_skips_the_step(
    tmp_path, checkpoint, batch, stage, dtype, optimizer
):
    optim = optim_spec(optimizer=optimizer)
    engine = build_engine(engine_spec(checkpoint, zero_stage=stage, dtype=dtype, optim=optim))
    plan = StepPlan(halves(batch), counts_of(batch))
    engine.train_step(batch, plan, SupervisedUpdate())
    engine.save(tmp_path / "before")

    def poisoned(forward, micro, counts):
        return forward(micro)[0].sum() * torch.nan, {}

    metrics = engine.train_step(batch, plan, poisoned)
    assert metrics["nonfinite_steps"].value == 1 and "grad_norm" not in metrics
    engine.save(tmp_path / "after")
    before, after = (
        load_file(tmp_path / when / "rank_00000.safetensors") for when in ("before", "after")
    )
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    assert engine.train_step(batch, plan, SupervisedUpdate())["nonfinite_steps"].value == 0


@pytest.mark.parametrize("stage", STAGES)
def test_weights_that_are_not_finite_are_not_sent(checkpoint, stage):
    """As a step that overflows leaves them, whose gradient was finite."""
    spec = engine_spec(checkpoint, zero_stage=stage, optim=optim_spec())
    worker = ModelWorker(WorkerContext("actor"), spec)
    worker.start()
    worker.connect(Route())
    worker.begin_sync(7, 2**20)
    assert [bucket.manifest.version for bucket in iter(worker.next_bucket, None)] == [7]
    poison(worker.engine, "hf.model.layers.1.mlp.up_proj.weight")
    assert worker.engine.nonfinite_weights() == ["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(
        UserError, match=r"layers\.1\.mlp\.up_proj\.weight of the actor has inf or NaN"
    ):
        worker.begin_sync(8, 2**20)


@pytest.mark.full
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_named_weights_speak_the_checkpoints_names(tmp_path, batch, arch, tied, stage):
    path = tiny_model_dir(tmp_path, tied=tied, arch=arch)
    engine = build_engine(engine_spec(path, zero_stage=stage, optim=optim_spec()))
    stored = load_file(path / "model.safetensors")
    found = weights(engine)
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)

    engine.train_step(batch, StepPlan(halves(batch), counts_of(batch)), SupervisedUpdate())
    engine.export(tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    trained = weights(engine)
    assert all(torch.equal(trained[name], exported[name]) for name in stored)
    assert not torch.equal(
        trained["model.embed_tokens.weight"], stored["model.embed_tokens.weight"]
    )
    expected = column_of(engine, batch, halves(batch))
    torch.testing.assert_close(
        plain_logprobs(tmp_path / "export", batch), expected, rtol=0, atol=1e-5
    )


def test_bf16_is_exported_as_bf16(tmp_path, checkpoint, batch):
    engine = build_engine(engine_spec(checkpoint, zero_stage=2, dtype="bf16", optim=optim_spec()))
    engine.train_step(batch, StepPlan(halves(batch), counts_of(batch)), SupervisedUpdate())
    engine.export(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert all(
        torch.equal(model.state_dict()[name], tensor) for name, tensor in engine.named_weights()
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_a_critic_and_its_round_trip(tmp_path, checkpoint, batch, stage):
    engine = build_engine(engine_spec(checkpoint, "values", zero_stage=stage, optim=optim_spec()))
    before = column_of(engine, batch, halves(batch))
    assert not before[:, 0].any() and not before[~batch.attention_mask].any()
    plan = StepPlan(halves(batch), counts_of(batch))
    losses = [
        engine.train_step(batch, plan, ValueUpdate(0.0, "token-mean"))["value_loss"].value
        for _ in range(8)
    ]
    assert losses[-1] < losses[0]

    engine.export(tmp_path)
    again = build_engine(engine_spec(tmp_path, "values"))
    values = column_of(engine, batch, halves(batch))
    torch.testing.assert_close(column_of(again, batch, halves(batch)), values, rtol=0, atol=1e-5)

    # As a reward model the same head scores each row at its last token; transformers agrees.
    rewards = column_of(build_engine(engine_spec(tmp_path, "rewards")), batch, halves(batch))
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    for row, length in enumerate(batch.lengths.tolist()):
        with torch.no_grad():
            expected = plain(input_ids=batch.token_ids[row : row + 1, :length]).logits
        assert float(rewards[row]) == pytest.approx(float(expected), abs=1e-5)

    # V of the state before token 6 is the head at token 5.
    ids = batch.token_ids[0:1, :6]
    with torch.no_grad():
        assert float(values[0, 6]) == pytest.approx(float(plain(input_ids=ids).logits), abs=1e-5)


def test_a_language_model_is_no_reward_model(checkpoint):
    with pytest.raises(UserError, match=r"score\.weight"):
        build_engine(engine_spec(checkpoint, "rewards"))


def test_a_missing_model_is_one_clear_message(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        build_engine(engine_spec(tmp_path / "nowhere"))


def test_an_incomplete_checkpoint_is_refused(tmp_path):
    path = tiny_model_dir(tmp_path, tied=False)
    stored = load_file(path / "model.safetensors")
    save_file(
        {k: v for k, v in stored.items() if k != "lm_head.weight"},
        path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        build_engine(engine_spec(path))


def test_the_policy_update_on_its_own_batch_has_ratio_one(checkpoint, batch):
    """Without old log-probs the policy's own are old: ratio 1, no KL, no clipping, gradient of -A
    log p."""
    engine = build_engine(engine_spec(checkpoint, optim=optim_spec()))
    update = PolicyUpdate("ppo", PPOOptions(), "token-mean", kl_coef=0.1, kl_estimator="k3")
    metrics = engine.train_step(batch, StepPlan(halves(batch), counts_of(batch)), update)
    mask = batch.loss_mask
    assert metrics["ratio_max"].value == 1.0
    assert metrics["ppo_kl"].value == 0.0 and metrics["clip_fraction"].value == 0.0
    assert metrics["policy_loss"].value == pytest.approx(
        -float(batch.advantages[mask].mean()), rel=1e-4
    )
    d = plain_logprobs(checkpoint, batch)[mask] - batch.ref_logprobs[mask]
    kl = (torch.expm1(-d) + d).clamp(max=10)
    assert metrics["kl"].value == pytest.approx(float(kl.mean()), rel=1e-4)
    assert metrics["kl_loss"].value == pytest.approx(float(kl.mean()), rel=1e-4)
    assert 0 < metrics["entropy"].value < math.log(66)


def dense_kl(path, reference, batch, temperature, top_k):
    """Row by row from the two models' own logits; tokens outside the reference's ``top_k``
    likeliest as one."""
    models = [AutoModelForCausalLM.from_pretrained(p) for p in (path, reference)]
    column = torch.zeros(batch.token_ids.shape)
    for row, length in enumerate(batch.lengths.tolist()):
        ids = batch.token_ids[row : row + 1, :length]
        with torch.no_grad():
            p, q = (
                (m(input_ids=ids).logits[0, :-1].double() / temperature).softmax(-1) for m in models
            )
        order = q.argsort(-1, descending=True)
        p, q = p.gather(-1, order), q.gather(-1, order)
        if top_k:
            p, q = (
                torch.cat([x[:, :top_k], x[:, top_k:].sum(-1, keepdim=True)], -1) for x in (p, q)
            )
        column[row, 1:length] = (p * (p / q).log()).sum(-1).float()
    return column * batch.loss_mask


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "top_k", "packing"),
    [(0, 5, False), (3, 5, True), (3, 0, False), (2, 0, True), (1, 5, True)],
)
def test_the_kl_of_whole_distributions(tmp_path, checkpoint, batch, stage, top_k, packing):
    """Through a reference's engine and a policy's: the dense KL, before the update and in it, where
    it falls."""
    policy_path, temperature = tiny_model_dir(tmp_path, seed=1, initializer_range=0.15), 0.7
    common = {
        "zero_stage": stage,
        "temperature": temperature,
        "chunk_size": 5,
        "packing": packing,
        "top_k": {"reference": top_k},
    }
    reference = build_engine(engine_spec(checkpoint, **common))
    optim = optim_spec(learning_rate=3e-3)
    policy = build_engine(
        engine_spec(policy_path, **common, optim=optim, others={"reference": str(checkpoint)})
    )

    outputs = reference.forward(batch, halves(batch), "reference")
    torch.testing.assert_close(
        outputs.pop("output"), plain_logprobs(checkpoint, batch, temperature), rtol=0, atol=1e-5
    )
    assert outputs.keys() == ({"ref_ids", "ref_support"} if top_k else {"ref_hidden"})
    annotated = batch.replace(**outputs)
    expected = dense_kl(policy_path, checkpoint, batch, temperature, top_k)
    found = policy.forward(annotated, halves(batch), "full_kl")["full_kl"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    update = PolicyUpdate(
        "ppo", PPOOptions(), "token-mean", kl_coef=1.0, kl_estimator="full", rl_coef=1.0
    )
    still = annotated.replace(advantages=torch.zeros_like(batch.advantages))
    plan = StepPlan([*halves(batch), [-1]], counts_of(batch))
    reports = [policy.train_step(still, plan, update) for _ in range(4)]
    assert reports[0]["kl_loss"].value == pytest.approx(
        float(expected[batch.loss_mask].mean()), rel=1e-4
    )
    kls = [report["kl"].value for report in reports]
    assert kls == sorted(kls, reverse=True) and kls[-1] < 0.9 * kls[0]


def switch_loss(path, rows, experts=4, chosen=2):
    """Equation 4 of the Switch Transformer over all layers and tokens of unpadded rows: experts *
    sum f_i P_i."""
    model = AutoModelForCausalLM.from_pretrained(path)
    shares, probabilities = [], []
    with torch.no_grad():
        for ids in rows:
            for logits in model(input_ids=ids[None], output_router_logits=True).router_logits:
                probabilities.append(logits.softmax(-1))
                top = probabilities[-1].topk(chosen).indices
                shares.append(torch.nn.functional.one_hot(top, experts).sum(1).float())
    return float(experts * (torch.cat(shares).mean(0) * torch.cat(probabilities).mean(0)).sum())


@pytest.mark.full
@pytest.mark.parametrize(
    ("arch", "stage", "run", "checkpointing"),
    [
        ("qwen3_moe", 0, {}, False),
        ("qwen3_moe", 3, {"packing": True}, True),
        ("qwen3_moe", 0, {"shares": True}, False),
        ("mixtral", 2, {}, True),
    ],
)
def test_the_load_balancing_loss(tmp_path, batch, arch, stage, run, checkpointing):
    """Padding left out, weighed by trained tokens, and it falls where it is all that is trained
    on."""
    overrides = {"num_local_experts": 4, "num_experts_per_tok": 2} if arch == "mixtral" else {}
    path = tiny_model_dir(tmp_path, arch=arch, **overrides)
    batch = alike(batch, (0, 0, 0, 0, 1, 1, 1, 1), (3, 3))
    rows = [batch.token_ids[i, :n] for i, n in enumerate(batch.lengths.tolist())]
    tokens = [int(batch.loss_mask[half].sum()) for half in halves(batch)]
    expected = sum(
        switch_loss(path, [rows[i] for i in half]) * n
        for half, n in zip(halves(batch), tokens, strict=True)
    )
    optim = optim_spec(learning_rate=3e-3)
    engine = build_engine(
        engine_spec(
            path, zero_stage=stage, optim=optim, gradient_checkpointing=checkpointing, **run
        )
    )
    update = balanced(PolicyUpdate("ppo", PPOOptions(), "token-mean", rl_coef=0.0), 1.0)
    plan = StepPlan([*halves(batch), [-1]], counts_of(batch))
    found = [engine.train_step(batch, plan, update)["aux_loss"].value for _ in range(6)]
    assert found[0] == pytest.approx(expected / sum(tokens), rel=1e-5)
    assert found[-1] < found[0]


def test_a_reward_model_balances_its_experts_too(tmp_path):
    """Pairs in micro-batches, each weighed by its answers' tokens; the rewards are those without
    it."""
    path = tiny_model_dir(tmp_path, arch="qwen3_moe")
    pairs = batch_of_pairs(4).replace(margins=torch.zeros(8))
    rows = [pairs.token_ids[i, :n] for i, n in enumerate(pairs.lengths.tolist())]
    plan = plan_pairs(pairs, 1, 2).steps[0][0]
    cut = plan.micro_batches
    tokens = [int(pairs.loss_mask[half].sum()) for half in cut]
    expected = sum(
        switch_loss(path, [rows[i] for i in half]) * n for half, n in zip(cut, tokens, strict=True)
    )
    engine = build_engine(engine_spec(path, "rewards", optim=optim_spec(learning_rate=3e-3)))
    before = column_of(engine, pairs, cut)
    update = balanced(PairRewardUpdate("sigmoid"), 1.0)
    assert plan.counts.tokens == sum(tokens), "of both answers of a pair"
    found = [engine.train_step(pairs, plan, update) for _ in range(6)]
    assert found[0]["aux_loss"].value == pytest.approx(expected / sum(tokens), rel=1e-5)
    plain = torch.nn.functional.softplus(before[1::2] - before[0::2]).mean()
    assert found[0]["loss"].value == pytest.approx(float(plain), rel=1e-5)
    assert found[-1]["aux_loss"].value < found[0]["aux_loss"].value


@pytest.mark.parametrize("stage", STAGES)
def test_rows_that_join_a_step_add_their_gradient(checkpoint, batch, stage):
    """Both losses in one step, each over its own tokens: as plain AdamW on their sum."""
    other = ragged_batch((6, 11, 8), seed=5)
    optim = optim_spec(max_norm=0.5)
    engine = build_engine(engine_spec(checkpoint, zero_stage=stage, optim=optim))
    plan = StepPlan([[2, 0], [1], [-1]], counts_of(other))
    also = other, plan, SupervisedUpdate(0.3, "ptx_loss")
    metrics = engine.train_step(
        batch, StepPlan(halves(batch), counts_of(batch)), SupervisedUpdate(), also
    )

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    optimizer = build_optimizer(model, optim)
    losses = []
    for b in (batch, other):
        scores = model(input_ids=b.token_ids).logits[:, :-1].log_softmax(-1)
        losses.append(
            -scores.gather(-1, b.token_ids[:, 1:, None])[..., 0][b.loss_mask[:, 1:]].mean()
        )
    (losses[0] + 0.3 * losses[1]).backward()
    norm = float(clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()
    assert metrics["loss"].value == pytest.approx(float(losses[0].detach()), rel=1e-5)
    assert metrics["ptx_loss"].value == pytest.approx(float(losses[1].detach()), rel=1e-5)
    assert metrics["grad_norm"].value == pytest.approx(norm, rel=1e-4)
    start, expected = load_file(checkpoint / "model.safetensors"), model.state_dict()
    # a first step is lr * sign: where a gradient is 0, rounding decides it
    for name, found in engine.named_weights():
        gap = (found - expected[name]).norm() / (expected[name] - start[name]).norm()
        assert float(gap) < 0.05, name


def test_a_dense_model_has_no_load_to_balance(tmp_path, checkpoint):
    check_mixture(str(tiny_model_dir(tmp_path, arch="qwen3_moe")), False)
    with pytest.raises(UserError, match="qwen3, for which transformers has no load-balancing loss"):
        check_mixture(str(checkpoint), False)


@pytest.mark.parametrize("weighs", [False, True])
def test_the_update_measures_the_engine_as_a_pass_of_its_own_does(checkpoint, batch, weighs):
    engine = build_engine(engine_spec(checkpoint, optim=optim_spec()))
    flags = RolloutCorrectionFlags(
        enable_vllm_is_correction=weighs, vllm_is_truncated_threshold=(0.01, 0.03)
    )
    old = column_of(engine, batch, halves(batch))
    expected = correct_rollouts(batch.replace(old_logprobs=old), flags)[1]
    assert len(expected) == (17 if weighs else 11)
    update = PolicyUpdate("ppo", PPOOptions(), "token-mean", correction=flags)
    plan = StepPlan([*halves(batch), [-1]], counts_of(batch))
    measured = engine.train_step(batch, plan, update)
    found = {n.removeprefix(COMPARED): m for n, m in measured.items() if n.startswith(COMPARED)}
    assert mismatch_figures(found) == pytest.approx(expected, rel=1e-5)
    assert not weighs or 0 < expected["is_ratio_low"] < 1 > expected["is_ratio_high"] > 0


def test_dummy_rows_change_nothing(checkpoint, batch):
    results = []
    for micro_batches in (halves(batch), [[*halves(batch)[0], -1], halves(batch)[1], [-1, -1]]):
        engine = build_engine(engine_spec(checkpoint, optim=optim_spec()))
        engine.train_step(batch, StepPlan(micro_batches, counts_of(batch)), SupervisedUpdate())
        results.append(weights(engine))
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name], rtol=1e-5, atol=1e-6, msg=name)


def test_a_step_of_dummies_alone_moves_nothing(checkpoint, batch):
    engine = build_engine(engine_spec(checkpoint, optim=optim_spec(l2=0.0)))
    before = weights(engine)
    metrics = engine.train_step(
        batch, StepPlan([[-1, -1]], StepCounts(0, 0, 1)), SupervisedUpdate()
    )
    assert metrics["grad_norm"].value == 0.0 and metrics["loss"].value is None
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(engine).items())


def test_free_memory_of_a_gpu_is_not_asked_by_its_number(monkeypatch):
    """A scheduler may set CUDA_VISIBLE_DEVICES to UUIDs, which DeepSpeed would take for numbers."""
    deepspeed_module()
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-6f1c0e5a")
    monkeypatch.setattr("deepspeed.accelerator.cuda_accelerator.pynvml", object())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2**30, 2**36))
    assert CUDA_Accelerator().available_memory() == 2**30
