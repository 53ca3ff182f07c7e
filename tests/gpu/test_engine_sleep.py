"""vLLM asleep on a GPU: memory comes back, and answers are those of before, at both levels."""

from __future__ import annotations

import asyncio

import pytest
from safetensors.torch import load_file

from openrl.rollout_engines.build import start_engine
from openrl.types import Sampling
from tests.gpu.syncing import connected, send
from tests.tiny import rollout_spec

GIB = 2**30
SHARE = 0.3
PROMPT, GREEDY = [5, 6, 7, 8], Sampling(24, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_and_wakes_in_two_stages(model_dir, record_property, level):
    weights = load_file(model_dir / "model.safetensors")
    size = sum(t.numel() * t.element_size() for t in weights.values())

    async def scenario() -> None:
        spec = rollout_spec(
            model_dir,
            device="cuda",
            longest=256,
            vllm_gpu_memory_utilization=SHARE,
            sleep_level=level,
        )
        engine = await start_engine("vllm", spec)
        sender = await connected(engine)
        free = {}

        async def read(when: str) -> None:
            free[when] = (await engine.memory()).free / GIB
            record_property(f"free GiB {when}", free[when])

        try:
            before = await engine.generate(PROMPT, GREEDY)
            await read("awake")
            await engine.sleep("weights", "cache")
            await read("asleep")
            await engine.wake("weights")
            await read("with weights")
            await send(sender, engine, weights, 1)
            await engine.sleep("weights")  # as a checkpoint between sync and rollout makes it
            await read("asleep again")
            await engine.wake("weights")
            if level == 2:
                with pytest.raises(RuntimeError, match="none were sent since"):
                    await engine.wake("cache")
                    await engine.generate(PROMPT, GREEDY)
                await send(sender, engine, weights, 2)
            else:
                await engine.wake("cache")
            await read("awake again")
            after = await engine.generate(PROMPT, GREEDY)
        finally:
            await engine.close()
        assert after.token_ids == before.token_ids
        assert after.logprobs == pytest.approx(before.logprobs, abs=1e-2)
        assert free["asleep"] - free["with weights"] >= 0.9 * size / GIB
        # the cache: most of the engine's share
        assert free["with weights"] - free["awake again"] > 1
        assert abs(free["asleep again"] - free["asleep"]) < 0.25
        assert abs(free["awake again"] - free["awake"]) < 0.25

    asyncio.run(scenario())
