"""Engines on one GPU: captured graphs, prefix caching, fp8 weights; each against a plain forward
pass, before and after a sync.

Engines of several GPUs are placed and told apart by tests without a GPU; their log-probs are
compared on a CPU."""

import asyncio

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from openrl.rollout_engines.build import start_engine
from openrl.types import Sampling
from tests.gpu.syncing import connected, send
from tests.tiny import rollout_spec, tiny_model_dir

SHARED = list(range(4, 44))  # a prefix of several blocks, which requests have in common
PROMPTS = [[*SHARED, token] for token in range(44, 60)]


def gap(directory, replies, device="cuda") -> float:
    """Largest difference in nats between the engine's log-probs and those of transformers in
    fp32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device)
    worst = 0.0
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        ids = torch.tensor([prompt + reply.token_ids], device=device)
        with torch.no_grad():
            logprobs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()
        worst = max(worst, float((expected - torch.tensor(reply.logprobs)).abs().max()))
    return worst


@pytest.mark.parametrize(
    ("options", "close"),
    [
        ({"dtype": "bf16"}, 0.3),  # captured graphs
        ({"dtype": "bf16", "enforce_eager": True}, 0.3),
        ({"dtype": "bf16", "enable_prefix_caching": True}, 0.3),
        ({"dtype": "bf16", "quantization": "fp8"}, 1.0),
    ],
    ids=["graphs", "eager", "prefixes", "fp8"],
)
def test_log_probs_before_and_after_a_sync(options, close, tmp_path):
    shape = {"initializer_range": 0.1, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    first = tiny_model_dir(tmp_path / "first", seed=0, **shape)
    second = tiny_model_dir(tmp_path / "second", seed=1, **shape)
    spec = rollout_spec(
        first, device="cuda", longest=256, vllm_gpu_memory_utilization=0.3, **options
    )

    async def scenario():
        engine = await start_engine("vllm", spec)
        try:

            async def ask():
                return await asyncio.gather(
                    *(engine.generate(p, Sampling(32, ignore_eos=True)) for p in PROMPTS)
                )

            before = await ask()
            await send(await connected(engine), engine, load_file(second / "model.safetensors"), 1)
            return before, await ask()
        finally:
            await engine.close()

    before, after = asyncio.run(scenario())
    assert gap(first, before) < close
    assert gap(second, after) < close  # old graphs, prefixes or packed weights would be nats away
    assert gap(first, after) > 1.0
