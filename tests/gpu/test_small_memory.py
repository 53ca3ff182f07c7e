"""What makes a model smaller on a GPU: 4-bit weights, adapters, an 8-bit optimizer, states and
weights on the host. Numbers against the plain way, and memory."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from openrl.config.groups.lora import LoRAFlags
from openrl.experience import StepPlan
from openrl.models.process_memory import freeze_gc_heap, memory_use
from openrl.training_engine.build import build_engine
from openrl.training_engine.distributed import init_distributed
from openrl.training_engine.updates import SupervisedUpdate
from tests.experience import column_of, counts_of, engine_spec, optim_spec, ragged_batch

GIB = 2**30
ROWS = [[*range(8)]]
ADAPTERS = LoRAFlags(lora_rank=8, lora_alpha=16)
PACKED = LoRAFlags(lora_rank=8, lora_alpha=16, load_in_4bit=True)
OPTIM = {"learning_rate": 1e-4}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    init_distributed(0, 1, "127.0.0.1", 0, "cuda", timeout=60)


def trained(model_dir, steps=3, **fields):
    """(engine, its column before and after some steps, GiB that are allocated then); the caller
    closes the engine before the next one is measured."""
    batch = ragged_batch()
    spec = engine_spec(model_dir, dtype="bf16", **fields)
    engine = build_engine(replace(spec, device="cuda"))
    before = column_of(engine, batch, ROWS)
    for _ in range(steps):
        report = engine.train_step(batch, StepPlan(ROWS, counts_of(batch)), SupervisedUpdate())
        assert report["nonfinite_steps"].value == 0
    after = column_of(engine, batch, ROWS)
    gc.unfreeze()
    freeze_gc_heap()
    torch.cuda.empty_cache()
    return engine, before, after, (memory_use("cuda").allocated or 0) / GIB


def figures(model_dir, **fields):
    """(column before and after some steps, GiB that are allocated then) of an engine that ends."""
    engine, *found = trained(model_dir, **fields)
    engine.close()
    return found


def distance(a, b):
    return float((a - b).abs().mean())


def test_4_bit_weights_load_onto_the_gpu_and_carry_adapters(model_dir, tmp_path, record_property):
    """The same answers as unpacked, within the rounding; a step is a step; what is exported is
    whole."""
    engine, before, after, packed = trained(model_dir, optim=optim_spec(**OPTIM), lora=PACKED)
    devices = {p.device.type for p in engine.model.parameters()}
    engine.export(tmp_path)
    start = column_of(engine, ragged_batch(), ROWS, as_reference=True)
    engine.close()
    del engine
    whole_before, _, whole = figures(model_dir, optim=optim_spec(**OPTIM), lora=ADAPTERS)
    record_property("GiB with 4-bit weights and with whole ones", f"{packed:.2f}, {whole:.2f}")
    record_property("mean gap of 4 bits, nats", distance(before, whole_before))
    assert devices == {"cuda"} and packed < whole
    torch.testing.assert_close(start, before)
    assert distance(after, before) > 1e-4
    merged = build_engine(replace(engine_spec(tmp_path, dtype="bf16"), device="cuda"))
    assert distance(column_of(merged, ragged_batch(), ROWS), after) < 0.05


def test_adapters_alone_take_steps(model_dir, tmp_path):
    """What the start was stays readable, and the merged export answers as the engine."""
    engine, before, after, _ = trained(model_dir, optim=optim_spec(**OPTIM), lora=ADAPTERS)
    torch.testing.assert_close(column_of(engine, ragged_batch(), ROWS, as_reference=True), before)
    assert distance(after, before) > 1e-4
    engine.export(tmp_path)
    merged = build_engine(replace(engine_spec(tmp_path, dtype="bf16"), device="cuda"))
    assert distance(column_of(merged, ragged_batch(), ROWS), after) < 0.05


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_8_bit_optimizer_goes_the_way_of_adamw(model_dir, record_property, stage):
    start, plain, of_plain = figures(model_dir, zero_stage=stage, optim=optim_spec(**OPTIM))
    small = optim_spec(optimizer="adamw_8bit", **OPTIM)
    _, found, of_small = figures(model_dir, zero_stage=stage, optim=small)
    record_property("GiB with AdamW and in 8 bits", f"{of_plain:.2f}, {of_small:.2f}")
    assert of_small < of_plain - 1.0  # 200 million parameters, 6 bytes of moments less for each
    assert distance(found, plain) < 0.2 * distance(start, plain)


@pytest.mark.parametrize(
    ("stage", "flags"),
    [
        (2, {"adam_offload": True}),
        (3, {"adam_offload": True, "param_offload": True}),
        (3, {"param_offload": True}),
    ],
    ids=str,
)
def test_what_waits_on_the_host_changes_no_number(model_dir, record_property, stage, flags):
    optim = optim_spec(**OPTIM)
    start, plain, of_plain = figures(model_dir, zero_stage=stage, optim=optim)
    _, found, on_host = figures(model_dir, zero_stage=stage, optim=optim, **flags)
    record_property("GiB on the GPU, without and with", f"{of_plain:.2f}, {on_host:.2f}")
    assert on_host < of_plain
    assert distance(found, plain) < 0.05 * distance(start, plain)
