"""Adapters in the training engine: what learns, what is exported, what the start of training was,
with 4-bit weights too."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
)

from openrl.algorithms.policy_losses import PPOOptions
from openrl.config.groups.lora import LoRAFlags
from openrl.config.groups.model import ModelChangeFlags
from openrl.errors import UserError
from openrl.experience import StepPlan
from openrl.lazy import peft
from openrl.models.lora import keep_differentiable
from openrl.training_engine.build import build_engine
from openrl.training_engine.distributed import init_distributed
from openrl.training_engine.updates import PolicyUpdate, ValueUpdate
from tests.experience import column_of, counts_of, engine_spec, optim_spec, ragged_batch
from tests.patience import PATIENCE
from tests.tiny import tiny_model_dir

ROWS = [[0, 1, 2, 3], [4, 5, 6, 7]]
POLICY = PolicyUpdate("ppo", PPOOptions(), "token-mean")
LORA = LoRAFlags(lora_rank=4, lora_alpha=8)


@pytest.fixture(scope="module", autouse=True)
def alone():
    init_distributed(0, 1, "127.0.0.1", 0, "cpu", timeout=PATIENCE)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def checkpoint(request, tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), tied=request.param)


def batch_of():
    batch = ragged_batch()
    return batch.replace(
        old_logprobs=-2.0 + 0.5 * batch.returns, values=torch.zeros_like(batch.returns)
    )


def trained(spec, update=POLICY, steps=3):
    engine, batch = build_engine(spec), batch_of()
    for _ in range(steps):
        engine.train_step(batch, StepPlan(ROWS, counts_of(batch)), update)
    return engine


def hf_logprobs(model, batch):
    """Of a transformers model on the trained tokens, row by row and without padding."""
    column = torch.zeros(batch.token_ids.shape)
    for row, length in enumerate(batch.lengths.tolist()):
        ids = batch.token_ids[row : row + 1, :length]
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
        column[row, 1:length] = logprobs.gather(-1, ids[:, 1:, None])[0, :, 0]
    return column * batch.loss_mask


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_adapters_learn_and_the_base_stays(checkpoint, tmp_path, stage):
    engine, batch = (
        trained(engine_spec(checkpoint, zero_stage=stage, optim=optim_spec(), lora=LORA)),
        batch_of(),
    )
    fresh = build_engine(engine_spec(checkpoint))
    now, before = column_of(engine, batch, ROWS), column_of(fresh, batch, ROWS)
    assert float((now - before).abs().max()) > 1e-2
    torch.testing.assert_close(column_of(engine, batch, ROWS, as_reference=True), before)
    assert torch.equal(column_of(engine, batch, ROWS), now)  # the look back changed nothing

    engine.export(tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(hf_logprobs(merged, batch), now, atol=2e-5, rtol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    unmerged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(hf_logprobs(unmerged, batch), now, atol=2e-5, rtol=1e-5)
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert stored and all(".lora_A.weight" in name or ".lora_B.weight" in name for name in stored)
    assert (
        load_file(tmp_path / "model.safetensors").keys()
        == load_file(checkpoint / "model.safetensors").keys()
    )


def test_a_run_goes_on_from_a_save_and_from_an_exported_adapter(checkpoint, tmp_path):
    spec = engine_spec(checkpoint, zero_stage=2, optim=optim_spec(), lora=LORA)
    engine, batch = trained(spec), batch_of()
    engine.save(tmp_path / "state")
    engine.export(tmp_path / "hf")
    plan = StepPlan(ROWS, counts_of(batch))
    resumed = build_engine(spec)
    resumed.load(tmp_path / "state")
    saved = column_of(engine, batch, ROWS)
    for one in (engine, resumed):
        one.train_step(batch, plan, POLICY)
    assert torch.equal(column_of(engine, batch, ROWS), column_of(resumed, batch, ROWS))

    again = LoRAFlags(lora_adapter_path=str(tmp_path / "hf/adapter"))
    started = trained(engine_spec(checkpoint, optim=optim_spec(), lora=again), steps=0)
    torch.testing.assert_close(column_of(started, batch, ROWS), saved)
    started.train_step(batch, plan, POLICY)
    assert float((column_of(started, batch, ROWS) - saved).abs().max()) > 1e-3
    # the reference is what it began with
    torch.testing.assert_close(column_of(started, batch, ROWS, as_reference=True), saved)


@pytest.mark.parametrize(("arch", "stage"), [("qwen3_moe", 3), ("gpt2", 2)])
def test_other_layers_export_what_they_compute(tmp_path, arch, stage):
    """Experts, which have no adapters, and weights that are stored (in, out)."""
    spec = engine_spec(
        tiny_model_dir(tmp_path, arch=arch), zero_stage=stage, optim=optim_spec(), lora=LORA
    )
    engine, batch = trained(spec), batch_of()
    now, start = column_of(engine, batch, ROWS), column_of(engine, batch, ROWS, as_reference=True)
    engine.export(tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(hf_logprobs(merged, batch), now, atol=2e-5, rtol=1e-5)
    assert float((now - start).abs().max()) > 1e-2


def test_frozen_adapters_are_in_the_file_too(checkpoint, tmp_path):
    changes = ModelChangeFlags(freeze_modules=r"layers\.0\.")
    engine = trained(engine_spec(checkpoint, optim=optim_spec(), lora=LORA, changes=changes))
    engine.export(tmp_path)
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    frozen = {name: tensor for name, tensor in stored.items() if ".layers.0." in name}
    assert len(frozen) == len(stored) / 2
    assert all(not tensor.any() for name, tensor in frozen.items() if "lora_B" in name)
    started = LoRAFlags(lora_adapter_path=str(tmp_path / "adapter"))
    again = trained(engine_spec(checkpoint, lora=started), steps=0)
    torch.testing.assert_close(
        column_of(again, batch_of(), ROWS), column_of(engine, batch_of(), ROWS)
    )


def test_a_critic_keeps_its_head_beside_the_adapter(checkpoint, tmp_path):
    engine = trained(
        engine_spec(checkpoint, "values", optim=optim_spec(), lora=LORA),
        ValueUpdate(0.0, "token-mean"),
    )
    engine.export(tmp_path)
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert "base_model.model.score.weight" in stored and config["modules_to_save"] == ["score"]
    batch = batch_of()
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    base = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1)
    unmerged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = batch.token_ids[:1, : int(batch.lengths[0])]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, unmerged(ids).logits, atol=2e-5, rtol=1e-5)


@pytest.mark.filterwarnings("error:.*autograd kernel was not registered")
def test_4_bit_weights_carry_adapters(checkpoint, tmp_path):
    lora = LoRAFlags(lora_rank=4, lora_alpha=8, load_in_4bit=True)
    engine, batch = (
        trained(engine_spec(checkpoint, zero_stage=2, dtype="bf16", optim=optim_spec(), lora=lora)),
        batch_of(),
    )
    now, start = column_of(engine, batch, ROWS), column_of(engine, batch, ROWS, as_reference=True)
    assert float((now - start).abs().max()) > 1e-2
    quantized = AutoModelForCausalLM.from_pretrained(
        checkpoint,
        dtype=torch.bfloat16,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
    )
    keep_differentiable(quantized)
    torch.testing.assert_close(hf_logprobs(quantized, batch), start, atol=0.1, rtol=0)
    engine.export(tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)  # whole weights: no bitsandbytes needed
    assert not hasattr(merged.config, "quantization_config")
    gap = (hf_logprobs(merged, batch) - now).abs().mean()
    moved = (hf_logprobs(merged, batch) - start).abs().mean()
    assert float(gap) < 0.02 < float(moved)


def test_adapters_over_4_bit_weights_learn_as_over_the_same_weights_unpacked(checkpoint, tmp_path):
    spec = partial(engine_spec, zero_stage=2, dtype="bf16", optim=optim_spec())
    packed = LoRAFlags(lora_rank=4, lora_alpha=8, load_in_4bit=True)
    trained(spec(checkpoint, lora=packed), steps=0).export(tmp_path)
    batch = batch_of()
    over_4_bit, over_whole = (
        trained(spec(checkpoint, lora=packed)),
        trained(spec(tmp_path, lora=LORA)),
    )
    start, whole = (
        column_of(over_whole, batch, ROWS, as_reference=True),
        column_of(over_whole, batch, ROWS),
    )
    gap = (column_of(over_4_bit, batch, ROWS) - whole).abs().mean()
    assert float(gap) < 0.1 * float((whole - start).abs().mean())


def test_dropout_acts_in_training_alone(checkpoint):
    spec = engine_spec(
        checkpoint, optim=optim_spec(), lora=LoRAFlags(lora_rank=4, lora_dropout=0.5)
    )
    engine, batch = trained(spec), batch_of()
    assert torch.equal(column_of(engine, batch, ROWS), column_of(engine, batch, ROWS))
    plain = trained(engine_spec(checkpoint, optim=optim_spec(), lora=LoRAFlags(lora_rank=4)))
    assert (
        float((column_of(engine, batch, ROWS) - column_of(plain, batch, ROWS)).abs().max()) > 1e-4
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lora_rank": 4, "target_modules": ("nothing",)}, "--target_modules nothing: .*nothing"),
        (
            {"lora_rank": 4, "target_modules": ("embed_tokens",)},
            "embed_tokens is not a linear layer",
        ),
        ({"lora_adapter_path": "/nowhere"}, "--lora_adapter_path: no adapter in /nowhere"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(checkpoint, flags, message):
    with pytest.raises(UserError, match=message):
        build_engine(engine_spec(checkpoint, optim=optim_spec(), lora=LoRAFlags(**flags)))
