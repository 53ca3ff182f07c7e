"""What is recomputed, what is frozen, what of the config is replaced, how experts multiply: by an
engine that trains."""

import pytest
import torch
from safetensors.torch import load_file
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from openrl.config.groups.lora import LoRAFlags
from openrl.config.groups.model import ModelChangeFlags
from openrl.errors import UserError
from openrl.experience import StepPlan
from openrl.models.changes import check_changes
from openrl.models.checkpointing import recompute
from openrl.training_engine.build import build_engine
from openrl.training_engine.updates import SupervisedUpdate, ValueUpdate
from tests.experience import column_of, counts_of, engine_spec, optim_spec
from tests.tiny import tiny_model_dir

HALVES = [[0, 2, 4, 6], [1, 3, 5, 7]]


pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_rank")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def checkpoint(folder):
    return tiny_model_dir(folder)


@pytest.fixture(scope="module")
def mixture(folder):
    return tiny_model_dir(folder, arch="qwen3_moe")


def trained(spec, batch, update=SupervisedUpdate()):
    engine = build_engine(spec)
    for _ in range(2):
        engine.train_step(batch, StepPlan(HALVES, counts_of(batch)), update)
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def kept(path, **how):
    """Numbers that a forward pass keeps for the backward pass of the model at ``path``, outside
    recomputed parts."""
    model = AutoModelForCausalLM.from_pretrained(path).train()
    if how:
        recompute(model, **how)
    sizes = []
    with saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        model(input_ids=torch.arange(4, 60)[None], use_cache=False)
    return sum(sizes)


def test_each_method_keeps_less_and_another_amount(mixture):
    found = [
        kept(mixture),
        kept(mixture, method="selective"),
        kept(mixture, method="block", num_layers=1),
        kept(mixture, method="uniform"),
    ]
    assert found == sorted(found, reverse=True) and len(set(found)) == 4
    assert found[3] < kept(mixture, method="moe") < found[0]
    assert kept(mixture, method="block") == found[3]


@pytest.mark.parametrize(
    ("stage", "flags"),
    [
        (3, {"gradient_checkpointing_method": "selective"}),
        (3, {"gradient_checkpointing_method": "moe"}),
        (2, {"gradient_checkpointing_method": "block", "gradient_checkpointing_num_layers": 1}),
        (2, {"gradient_checkpointing_use_reentrant": True}),
    ],
    ids=str,
)
def test_what_is_recomputed_changes_no_weight(mixture, batch, stage, flags):
    expected = trained(engine_spec(mixture, zero_stage=stage, optim=optim_spec()), batch)
    found = trained(
        engine_spec(
            mixture, zero_stage=stage, optim=optim_spec(), gradient_checkpointing=True, **flags
        ),
        batch,
    )
    assert all(
        torch.allclose(found[name], tensor, rtol=0, atol=1e-5) for name, tensor in expected.items()
    )


def test_adapters_learn_through_reentrant_layers(checkpoint, batch):
    """The frozen embedding gives no gradient, by which torch would leave the first layers out."""
    lora = LoRAFlags(lora_rank=4)
    expected = trained(engine_spec(checkpoint, optim=optim_spec(), lora=lora), batch)
    flags = {"gradient_checkpointing": True, "gradient_checkpointing_use_reentrant": True}
    found = trained(engine_spec(checkpoint, optim=optim_spec(), lora=lora, **flags), batch)
    start = load_file(checkpoint / "model.safetensors")
    assert not torch.allclose(
        found["model.layers.0.mlp.up_proj.weight"], start["model.layers.0.mlp.up_proj.weight"]
    )
    assert all(
        torch.allclose(found[name], tensor, rtol=0, atol=1e-5) for name, tensor in expected.items()
    )


def test_a_dense_model_has_no_experts_to_recompute(checkpoint):
    with pytest.raises(UserError, match="moe: Qwen3ForCausalLM has no such parts"):
        recompute(AutoModelForCausalLM.from_pretrained(checkpoint), "moe")


@pytest.mark.parametrize(
    ("kind", "stage"), [("logprobs", 0), ("logprobs", 2), ("logprobs", 3), ("values", 2)]
)
def test_frozen_parameters_stay_and_the_others_learn(tmp_path, checkpoint, batch, kind, stage):
    changes = ModelChangeFlags(freeze_modules=r"embed_tokens|model\.layers\.0\.")
    spec = engine_spec(
        checkpoint, kind, zero_stage=stage, optim=optim_spec(l2=0.5), changes=changes
    )
    update = SupervisedUpdate() if kind == "logprobs" else ValueUpdate(0.0, "token-mean")
    found, start = trained(spec, batch, update), load_file(checkpoint / "model.safetensors")
    moved = {name for name in start if not torch.equal(found[name], start[name])}
    still = {name for name in start if "embed_tokens" in name or "layers.0." in name}
    assert still and moved == start.keys() - still


def test_frozen_parameters_resume(tmp_path, checkpoint, batch):
    changes = ModelChangeFlags(freeze_modules="mlp")
    spec = engine_spec(checkpoint, zero_stage=3, optim=optim_spec(), changes=changes)
    plan = StepPlan(HALVES, counts_of(batch))
    engine, resumed = build_engine(spec), build_engine(spec)
    engine.train_step(batch, plan, SupervisedUpdate())
    engine.save(tmp_path)
    resumed.load(tmp_path)
    assert engine.train_step(batch, plan, SupervisedUpdate()) == resumed.train_step(
        batch, plan, SupervisedUpdate()
    )


def test_fields_of_the_config_are_replaced_and_exported(tmp_path, checkpoint, batch):
    changes = ModelChangeFlags(
        model_config_overrides={"rms_norm_eps": 0.5, "max_position_embeddings": 64}
    )
    engine = build_engine(engine_spec(checkpoint, optim=optim_spec(), changes=changes))
    plain = AutoModelForCausalLM.from_pretrained(
        checkpoint, rms_norm_eps=0.5, max_position_embeddings=64
    )
    ids = batch.token_ids[:1, :12]
    with torch.no_grad():
        expected = (
            plain(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        )
    found, trained = column_of(engine, batch, HALVES)[0, 1:12], batch.loss_mask[0, 1:12]
    torch.testing.assert_close(found, expected * trained, rtol=0, atol=1e-5)
    engine.export(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (0.5, 64)


@pytest.mark.parametrize("how", ["eager", "batched_mm", "grouped_mm"])
def test_experts_multiply_as_asked_and_alike(mixture, batch, how):
    found = build_engine(engine_spec(mixture, changes=ModelChangeFlags(experts_implementation=how)))
    assert found.model.hf.config._experts_implementation == how
    expected = build_engine(engine_spec(mixture))
    torch.testing.assert_close(
        column_of(found, batch, HALVES), column_of(expected, batch, HALVES), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_config_overrides": {"rope_thetta": 1}}, "no field 'rope_thetta'"),
        ({"model_config_overrides": {"rope_scaling": {"factor": 4.0}}}, "has no rope_theta"),
        ({"model_config_overrides": {"dtype": "float16"}}, "dtype has its own flag"),
        ({"experts_implementation": "eager"}, "has no experts"),
        ({"freeze_modules": "visual"}, "matches no parameter"),
        ({"freeze_modules": "."}, "matches every parameter"),
    ],
    ids=str,
)
def test_what_the_model_does_not_have_is_refused_before_it_is_loaded(checkpoint, changes, message):
    with pytest.raises(UserError, match=message):
        check_changes(str(checkpoint), ModelChangeFlags(**changes), False)


def test_what_the_model_has_is_fine(mixture):
    changes = ModelChangeFlags(
        model_config_overrides={"rms_norm_eps": 1e-5},
        experts_implementation="eager",
        freeze_modules="embed",
    )
    check_changes(str(mixture), changes, False)
