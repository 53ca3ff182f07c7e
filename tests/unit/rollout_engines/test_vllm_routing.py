"""vLLM's engine with --routing_replay: what a new policy leaves of older prefixes and experts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from openrl.rollout_engines.vllm_engine import VLLMEngine
from openrl.types import Sampling
from tests.tiny import rollout_spec, tiny_model_dir

LAYERS = 2  # of the tiny mixture, which chooses two experts


class LLM:
    """Samples 9 until it is aborted, or four tokens. Experts come with whole answers alone, and
    are the number of weight updates so far."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 66)
        self.aborted, self.started = asyncio.Event(), asyncio.Event()
        self.resets = self.updates = 0

    async def generate(self, prompt, params, name, lora_request):
        row = prompt["prompt_token_ids"]
        if not self.updates:
            self.started.set()
            await self.aborted.wait()
            yield self.output(row, 2, "abort", None)
            return
        computed = len(row) + 3
        experts = np.full((computed, LAYERS, 2), self.updates, dtype=np.uint8)
        yield self.output(row, 4, "length", experts)

    def output(self, row, count, reason, experts):
        class Logprobs(list):
            token_ids, logprobs = [9] * count, [-1.0] * count

        reply = SimpleNamespace(
            token_ids=[9] * count,
            logprobs=Logprobs([9] * count),
            finish_reason=reason,
            routed_experts=experts,
        )
        return SimpleNamespace(outputs=[reply], prompt_token_ids=row)

    async def abort(self, names):
        self.aborted.set()

    async def check_health(self):
        pass

    async def reset_prefix_cache(self):
        self.resets += 1
        return True

    async def collective_rpc(self, method, args):
        self.updates += 1
        return [{"lost": [], "changed": [], "absent": []}]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("mixture"), arch="qwen3_moe", tied=False)


@pytest.mark.parametrize(
    ("changes", "resets"), [({}, 0), ({"routes": True}, 1), ({"enable_prefix_caching": True}, 1)]
)
def test_a_sync_drops_the_prefixes_that_vllm_caches(mixture, changes, resets):
    async def synced() -> int:
        llm = LLM()
        engine = VLLMEngine(rollout_spec(mixture, device="cuda", **changes), llm, None)
        await engine.finish_sync(1)
        return llm.resets

    assert asyncio.run(synced()) == resets


def test_experts_of_an_aborted_request_stay_unknown(mixture):
    """The request after a sync computes the row anew, with experts that did not sample it."""

    async def continued():
        llm = LLM()
        engine = VLLMEngine(rollout_spec(mixture, device="cuda", routes=True), llm, None)
        sampling = Sampling(6, ignore_eos=True, routes=True)
        reply = asyncio.create_task(engine.generate([4, 5, 6], sampling))
        await llm.started.wait()
        await engine.pause()
        await engine.finish_sync(1)
        await engine.resume()
        return await reply

    reply = asyncio.run(continued())
    assert reply.token_ids == [9] * 6
    of_tokens = [*reply.routes.ids[:: LAYERS * 2]]
    # prompt and first token were computed before; the second one not before the sync
    assert of_tokens == [-2] * 4 + [1] * 4 + [-1]


def test_experts_are_counted_with_the_overrides_of_the_config(mixture):
    changed = rollout_spec(
        mixture, device="cuda", routes=True, config_overrides={"num_experts_per_tok": 1}
    )
    assert VLLMEngine(changed, LLM(), None)._routers.width == LAYERS
