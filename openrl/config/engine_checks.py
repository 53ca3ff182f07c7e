"""Rules of the rollout engine's flags."""

from __future__ import annotations

from collections.abc import Iterator

from openrl.config.commands import PPOConfig
from openrl.config.derived import max_model_len
from openrl.flags.checks import Problem, check

OWN_FLAGS = {
    "model": "pretrain",
    "dtype": "vllm_dtype",
    "max_model_len": "vllm_max_model_len",
    "max_num_seqs": "vllm_max_num_seqs",
    "max_num_batched_tokens": "vllm_max_num_batched_tokens",
    "block_size": "vllm_block_size",
    "quantization": "vllm_quantization",
    "load_format": "vllm_load_format",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "enforce_eager": "enforce_eager",
    "enable_prefix_caching": "enable_prefix_caching",
    "trust_remote_code": "trust_remote_code",
    "seed": "seed",
}
"""Field of vLLM's EngineArgs -> the flag that sets it."""

RESERVED = ("logprobs_mode", "worker_extension_cls")
"""Fields that training depends on."""


@check(PPOConfig)
def engine_kwargs_are_further_ones(config: PPOConfig, given: frozenset[str]) -> Iterator[Problem]:
    for name, value in config.engine.vllm_engine_kwargs.items():
        if flag := OWN_FLAGS.get(name):
            yield Problem(("vllm_engine_kwargs", flag), f"{name} has a flag of its own", f"--{flag} {value}")
        elif name in RESERVED:
            yield Problem(("vllm_engine_kwargs",), f"training depends on {name}", "leave it out")


@check(PPOConfig)
def samples_fit_the_engine(config: PPOConfig, given: frozenset[str]) -> Iterator[Problem]:
    limit, longest = config.engine.vllm_max_model_len, max_model_len(config.sampling)
    if limit is not None and limit < longest:
        yield Problem(
            ("vllm_max_model_len", "prompt_max_len", "generate_max_len"),
            f"prompt and response may have {longest} tokens together, the engine takes {limit}",
            f"--vllm_max_model_len {longest}",
        )


@check(PPOConfig)
def engine_and_trainer_compute_alike(config: PPOConfig, given: frozenset[str]) -> Iterator[Problem]:
    engine, ours = config.engine, config.model.param_dtype
    if engine.vllm_quantization and config.device.device == "cpu":
        yield Problem(("vllm_quantization", "device"), f"{engine.vllm_quantization} needs a GPU", "leave it out")
    coarse = engine.vllm_quantization or (engine.vllm_dtype if engine.vllm_dtype not in ("auto", ours) else None)
    if coarse and not config.correction.enable_vllm_is_correction:
        flag = "vllm_quantization" if engine.vllm_quantization else "vllm_dtype"
        yield Problem(
            (flag,),
            f"the engine samples in {coarse}, the trainer computes in {ours}: their log-probs drift apart",
            "--enable_vllm_is_correction",
            fatal=False,
        )
