"""From flags to a rollout engine: its specification, its sampling parameters and its start."""

from __future__ import annotations

from typing import Any, Literal

from openrl.config.groups.logging import SeedFlags
from openrl.config.groups.model import ModelFlags
from openrl.config.groups.rollout_engine import OneEngineFlags
from openrl.config.groups.sampling import DrawFlags
from openrl.config.groups.vision import ImageFlags
from openrl.rollout_engines.engine import EngineSpec, RolloutEngine
from openrl.types import Sampling


def engine_spec(
    model: ModelFlags,
    engine: OneEngineFlags,
    images: ImageFlags,
    longest: int,
    debug: SeedFlags,
    device: Literal["cpu", "cuda"],
    engines: int = 1,
    shared: bool = False,
    **more: Any,
) -> EngineSpec:
    """Build the spec that a run's flags ask for. ``longest`` counts the tokens of prompt and
    response together. On a CPU all ``engines`` of the run are assumed to share one machine.
    ``shared`` means that models run on the engine's GPUs too. ``more`` are further fields."""
    return EngineSpec(
        model=model.pretrain,
        tokenizer=model.tokenizer_path,
        dtype=model.param_dtype if engine.vllm_dtype == "auto" else engine.vllm_dtype,
        device=device,
        attention=model.attn_implementation,
        max_model_len=engine.vllm_max_model_len or longest,
        seed=debug.seed,
        max_num_seqs=engine.vllm_max_num_seqs,
        max_num_batched_tokens=engine.vllm_max_num_batched_tokens,
        block_size=engine.vllm_block_size,
        quantization=engine.vllm_quantization,
        max_images=images.max_images_per_prompt,
        processor_kwargs=images.mm_processor_kwargs,
        engine_kwargs=engine.vllm_engine_kwargs,
        gpu_memory_utilization=engine.vllm_gpu_memory_utilization or (0.6 if shared else 0.9),
        sizes=engine.sizes,
        engines_per_machine=engines,
        enforce_eager=engine.enforce_eager,
        enable_prefix_caching=engine.enable_prefix_caching,
        trust_remote_code=model.trust_remote_code,
        deterministic=debug.full_determinism,
        **more,
    )


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
