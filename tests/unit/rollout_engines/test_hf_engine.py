"""What the engine of transformers is told."""

from __future__ import annotations

import asyncio
from functools import partial

from openrl.rollout_engines.engine import EngineSpec
from openrl.rollout_engines.hf_engine import HFEngine
from tests.tiny import rollout_spec, tiny_model_dir


def test_it_computes_with_the_attention_that_was_asked_for(tmp_path):
    async def attention(spec: EngineSpec) -> str:
        engine = await HFEngine.start(spec)
        try:
            return engine._model.config._attn_implementation
        finally:
            await engine.close()

    spec = partial(rollout_spec, tiny_model_dir(tmp_path), param_dtype="fp32")
    assert asyncio.run(attention(spec(attn_implementation="eager"))) == "eager"
    assert asyncio.run(attention(spec())) != "eager"
