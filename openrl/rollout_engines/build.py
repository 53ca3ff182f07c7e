"""Starts a rollout engine, and turns flags into its sampling parameters."""

from __future__ import annotations

from typing import Any

from openrl.config.groups.sampling import DrawFlags
from openrl.rollout_engines.engine import EngineSpec, RolloutEngine
from openrl.types import Sampling


async def start_engine(backend: str, spec: EngineSpec) -> RolloutEngine:
    """Start an engine and return it ready for requests. ``backend`` is a value of
    --rollout_backend; only that backend's library is imported."""
    if backend == "vllm":
        from openrl.rollout_engines.vllm_engine import VLLMEngine

        return await VLLMEngine.start(spec)
    if backend == "hf":
        from openrl.rollout_engines.hf_engine import HFEngine

        return await HFEngine.start(spec)
    raise ValueError(f"unknown rollout backend {backend!r}")


def sampling_from_flags(flags: DrawFlags, max_tokens: int, **more: Any) -> Sampling:
    return Sampling(
        max_tokens=max_tokens,
        temperature=flags.temperature,
        top_p=flags.top_p,
        top_k=flags.top_k,
        min_p=flags.min_p,
        repetition_penalty=flags.repetition_penalty,
        stop=flags.stop,
        **more,
    )
