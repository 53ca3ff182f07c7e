"""Tokens per second of an engine and of a training step on one GPU, and what a temperature does to
the gap between the two."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrl.experience import StepPlan
from openrl.rollout_engines.build import start_engine
from openrl.training_engine.build import build_engine
from openrl.training_engine.distributed import init_distributed
from openrl.training_engine.updates import SupervisedUpdate
from openrl.types import Sampling
from tests.experience import counts_of, engine_spec, optim_spec, ragged_batch
from tests.tiny import rollout_spec

REQUESTS, LENGTH = 256, 256


def engine_of(model_dir, **options):
    return rollout_spec(
        model_dir, device="cuda", longest=512, vllm_gpu_memory_utilization=0.4, **options
    )


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_tokens_per_second_of_an_engine(model_dir, record_property, options):
    async def scenario() -> float:
        engine = await start_engine("vllm", engine_of(model_dir, **options))
        sampling = Sampling(LENGTH, ignore_eos=True)
        try:
            await engine.generate([5, 6, 7], sampling)
            started = time.perf_counter()
            replies = await asyncio.gather(
                *(engine.generate([5, 6, 7, 8 + i % 32], sampling) for i in range(REQUESTS))
            )
            seconds = time.perf_counter() - started
        finally:
            await engine.close()
        return sum(len(reply.token_ids) for reply in replies) / seconds

    record_property("sampled tokens per second", asyncio.run(scenario()))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gap_at_a_temperature(model_dir, record_property, temperature):
    """bf16 against a forward pass in fp32 of the same weights. A sampler that divides logits in
    bf16 shows here."""

    async def scenario():
        engine = await start_engine("vllm", engine_of(model_dir))
        sampling = Sampling(64, temperature, ignore_eos=True)
        try:
            prompts = [[5, 6, 7, 8 + i] for i in range(16)]
            return prompts, await asyncio.gather(*(engine.generate(p, sampling) for p in prompts))
        finally:
            await engine.close()

    prompts, replies = asyncio.run(scenario())
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).cuda()
    gaps = []
    for prompt, reply in zip(prompts, replies, strict=True):
        ids = torch.tensor([prompt + reply.token_ids], device="cuda")
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
        expected = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()
        gaps.append((expected - torch.tensor(reply.logprobs)).abs())
    gap = torch.cat(gaps)
    record_property("gap, mean and most", f"{gap.mean():.4f}, {gap.max():.3f}")
    assert float(gap.mean()) < 0.02


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_tokens_per_second_of_a_training_step(model_dir, record_property, packing):
    init_distributed(0, 1, "127.0.0.1", 0, "cuda", timeout=60)
    batch = ragged_batch(tuple(64 + 16 * (i % 12) for i in range(64)))
    spec = engine_spec(
        model_dir,
        dtype="bf16",
        zero_stage=2,
        optim=optim_spec(learning_rate=1e-5),
        gradient_checkpointing=True,
        packing=packing,
    )
    engine = build_engine(replace(spec, device="cuda"))
    plan = StepPlan([[*range(i, i + 16)] for i in range(0, 64, 16)], counts_of(batch))
    engine.train_step(batch, plan, SupervisedUpdate())
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(3):
        engine.train_step(batch, plan, SupervisedUpdate())
    torch.cuda.synchronize()
    tokens = 3 * int(batch.attention_mask.sum())
    record_property("trained tokens per second", tokens / (time.perf_counter() - started))
    record_property("peak GiB", torch.cuda.max_memory_allocated() / 2**30)
