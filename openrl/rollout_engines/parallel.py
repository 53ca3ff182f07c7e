"""Checks that vLLM can run a model as the flags ask, and split it. vLLM would only refuse after
minutes; these checks run before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PretrainedConfig

from openrl.config.groups.rollout_engine import OneEngineFlags, ParallelSizes
from openrl.errors import ErrorCollector, UserError
from openrl.models.experts import expert_count
from openrl.models.stored import load_config

ON_A_CPU = {
    "vllm_pipeline_parallel_size": "vLLM's CPU worker keeps no activations between stages",
    "vllm_enable_expert_parallel": "vLLM's CPU kernel of experts crashes on a part of them",
    "vllm_data_parallel_size": "replicas exchange tokens by all_gatherv, which vLLM has on GPUs",
    "vllm_quantization": "vLLM's CPU worker has no kernels for fp8",
}
"""Flag -> why vLLM 0.32 does not support it on a CPU. Tensor parallelism does work there."""

BLOCKS = {"cpu": 32, "cuda": 16}
"""Device -> the number of which vLLM's blocks are a multiple."""


def check_engine(model: str, engine: OneEngineFlags, device: str, trust_remote_code: bool) -> None:
    """Raise UserError with every reason why vLLM cannot run ``model`` this way on ``device``."""
    collector = ErrorCollector()
    sizes, expert = engine.sizes, getattr(engine, "vllm_enable_expert_parallel", False)
    requested = {
        "vllm_pipeline_parallel_size": sizes.pipeline > 1,
        "vllm_enable_expert_parallel": expert,
        "vllm_data_parallel_size": sizes.data > 1,
        "vllm_quantization": engine.vllm_quantization is not None,
    }
    for flag, reason in ON_A_CPU.items():
        if requested[flag] and device == "cpu":
            with collector:
                raise UserError(f"--{flag} needs GPUs: {reason}", "leave it out")
    size, unit = engine.vllm_block_size or 0, BLOCKS[device]
    if size % unit:
        with collector:
            raise UserError(
                f"--vllm_block_size: a block of {size} tokens is not a multiple of {unit}",
                f"--vllm_block_size {max(unit, size - size % unit)}",
            )
    if sizes.width > 1 or expert:
        with collector:
            config = load_config(model, trust_remote_code).get_text_config()
            for message, remedy in shape_problems(config, sizes, expert):
                with collector:
                    raise UserError(message, remedy)
    collector.raise_all()


def shape_problems(
    config: PretrainedConfig, sizes: ParallelSizes, expert: bool
) -> Iterator[tuple[str, str]]:
    """Yield (message, remedy) for each part of the model that vLLM's layers cannot divide."""
    heads, tensor = config.num_attention_heads, sizes.tensor
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    experts = expert_count(config)
    fits = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
    ]
    divisors = f"--vllm_tensor_parallel_size {' or '.join(map(str, fits))}"
    if heads % tensor:
        message = f"does not divide the {heads} attention heads of the model"
        yield f"--vllm_tensor_parallel_size {tensor} {message}", divisors
    # vLLM splits the key-value heads over ranks, or replicates each on several ranks
    elif kv_heads % tensor and tensor % kv_heads:
        message = f"and the {kv_heads} key-value heads: neither divides the other"
        yield f"--vllm_tensor_parallel_size {tensor} {message}", divisors
    inner = getattr(config, "moe_intermediate_size" if experts else "intermediate_size", None)
    if inner and inner % tensor and not expert:
        yield (
            f"--vllm_tensor_parallel_size {tensor} does not divide the {inner} columns of the MLP",
            "a divisor",
        )
    flag, layers = "--vllm_pipeline_parallel_size", config.num_hidden_layers
    if sizes.pipeline > layers:
        yield f"{flag} {sizes.pipeline}: the model has {layers} layers", f"{flag} {layers} or less"
    if expert and not experts:
        yield "--vllm_enable_expert_parallel: the model has no experts", "leave it out"
