"""What the engine of transformers is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from openrl.config.groups.logging import SeedFlags
from openrl.config.groups.model import ModelFlags
from openrl.config.groups.rollout_engine import OneEngineFlags
from openrl.config.groups.vision import ImageFlags
from openrl.rollout_engines.build import engine_spec
from openrl.rollout_engines.engine import EngineSpec
from openrl.rollout_engines.hf_engine import HFEngine
from tests.tiny import tiny_model_dir


def test_it_computes_with_the_attention_that_was_asked_for(tmp_path):
    async def attention(spec: EngineSpec) -> str:
        engine = await HFEngine.start(spec)
        try:
            return engine._model.config._attn_implementation
        finally:
            await engine.close()

    model = ModelFlags(pretrain=str(tiny_model_dir(tmp_path)), attn_implementation="eager")
    flags = OneEngineFlags(), ImageFlags(), 32, SeedFlags()
    spec = replace(engine_spec(model, *flags, "cpu"), dtype="fp32")
    assert asyncio.run(attention(spec)) == "eager"
    assert asyncio.run(attention(replace(spec, attention=None))) != "eager"
