"""Starts vLLM: looks up the features of it that openrl relies on, by name, and derives the fields
of its ``EngineArgs`` from a spec.

The supported versions are 0.26 to 0.32; the tests run on 0.32. Of vLLM's weight transfer we use
only the worker side, which is the same in all of them. The trainer side, which changes from version
to version, is our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import signature
from typing import Any

from openrl.errors import UserError
from openrl.models.causal_lm import DTYPES
from openrl.rollout_engines.engine import CPU_CACHE, EngineSpec
from openrl.rollout_engines.vllm_adapters import room_for_rank
from openrl.rollout_engines.vllm_process import (
    forking_engine,
    is_forked,
    preload_engine,
    sockets_in,
)

_SMALLEST_BLOCK = 32  # tokens, for attention on a CPU


def start_llm(spec: EngineSpec, sockets: str) -> Any:
    """Start vLLM's ``AsyncLLM`` with the settings of ``spec``. Its sockets are in the directory
    ``sockets``. Raises UserError if this vLLM lacks a feature that we need, and whatever vLLM
    raises."""
    preload_engine(spec)
    import vllm
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    if missing := missing_features(REQUIRED):
        raise UserError(
            f"vLLM {vllm.__version__} lacks {', '.join(missing)}", "pip install 'vllm>=0.26,<0.33'"
        )
    if spec.keep_cache_on_pause and (missing := missing_features(KEEPING)):
        raise UserError(
            f"--partial_rollout_cache keep: vLLM {vllm.__version__} lacks {', '.join(missing)}",
            "--partial_rollout_cache refill, or pip install 'vllm==0.32.*'",
        )
    if spec.routes and (missing := missing_features(ROUTING)):
        raise UserError(
            f"--routing_replay: vLLM {vllm.__version__} lacks {', '.join(missing)}",
            "pip install 'vllm==0.32.*'",
        )
    with forking_engine(spec), sockets_in(sockets, spec):
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(spec)))


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the fields of vLLM's ``EngineArgs``. Others keep vLLM's defaults."""
    model, engine = spec.model, spec.engine
    chosen: dict[str, Any] = {
        "max_num_seqs": 1 if spec.deterministic else engine.vllm_max_num_seqs,
        "max_num_batched_tokens": engine.vllm_max_num_batched_tokens,
        "block_size": block_size(spec),
        "quantization": engine.vllm_quantization,
    }
    fixed = {
        "model": model.pretrain,
        "tokenizer": model.tokenizer_path,
        "dtype": str(DTYPES[spec.dtype]).removeprefix("torch."),
        "max_model_len": spec.capacity,
        "seed": spec.seed,
        "load_format": spec.load_format,
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        # compiled graphs of the CPU backend keep the packed weights they were traced with, so a
        # sync would not reach them
        "enforce_eager": engine.enforce_eager or spec.device == "cpu",
        "enable_prefix_caching": caches_prefixes(spec),
        "trust_remote_code": model.trust_remote_code,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 2**20,  # --kept_ids_max limits them
        "worker_extension_cls": "openrl.rollout_engines.vllm_worker.WorkerExtension",
        # registered by ``vllm_transfer``, as its BACKEND
        "weight_transfer_config": {"backend": "openrl"},
        "enable_sleep_mode": spec.sleep_level > 0 and spec.device == "cuda",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "hf_overrides": spec.config_overrides,
    }
    if spec.images.max_images_per_prompt:
        chosen["limit_mm_per_prompt"] = {"image": spec.images.max_images_per_prompt}
        chosen["mm_processor_kwargs"] = spec.images.mm_processor_kwargs or None
    if spec.routes:
        chosen["enable_return_routed_experts"] = True
    if spec.adapter_rank:  # reserve room for the adapter in use and, during a sync, its successor
        chosen |= {"enable_lora": True, "max_cpu_loras": 2}
        chosen["max_lora_rank"] = room_for_rank(spec.adapter_rank)
    given = {name: value for name, value in chosen.items() if value is not None}
    cpu = _cpu_arguments(spec) if spec.device == "cpu" else {}
    return fixed | given | _parallel_arguments(spec) | cpu | engine.vllm_engine_kwargs


def caches_prefixes(spec: EngineSpec) -> bool:
    """Return whether vLLM keeps keys and values of earlier requests, which a new policy makes
    stale. It does if it returns experts, which it keeps beside them."""
    chosen = spec.routes or (spec.engine.enable_prefix_caching and not spec.deterministic)
    given = spec.engine.vllm_engine_kwargs.get("enable_prefix_caching", chosen)
    return given is None or bool(given)  # None: vLLM decides


def block_size(spec: EngineSpec) -> int | None:
    """Return the tokens of a block of the cache, or None for vLLM's default. On a CPU that is 128,
    and only full blocks are reused, so a cached prefix would need 128 tokens to save anything."""
    size = spec.engine.vllm_block_size
    if size is None and spec.device == "cpu" and caches_prefixes(spec):
        return _SMALLEST_BLOCK
    return size


def _parallel_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the fields that split the model. They always name the executor: inside a Ray actor
    vLLM would otherwise choose the Ray executor and claim the actor's GPUs."""
    sizes = spec.engine.sizes
    if sizes.width == 1:
        return {}
    return {
        "tensor_parallel_size": sizes.tensor,
        "pipeline_parallel_size": sizes.pipeline,
        "data_parallel_size": sizes.data,
        "enable_expert_parallel": spec.expert_parallel,
        "distributed_executor_backend": "ray" if spec.spans_nodes else "mp",
    }


def _cpu_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the fields for an engine on a CPU.

    Unless threads are bound to cores, a model that is not divided runs in the scheduler's process.
    vLLM's default, a separate worker process, keeps two cores busy: each process spins while the
    other computes, and the worker for a second longer.

    Prompts are computed whole if they fit. For a partial prompt vLLM rewinds the random generator
    by an offset, which CPU generators lack, so a request with a seed would crash the engine."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    step = spec.engine.vllm_max_num_batched_tokens or 2**31
    cache = {
        "kv_cache_memory_bytes": CPU_CACHE,
        "enable_chunked_prefill": step < spec.capacity,
    }
    alone = is_forked(spec) and spec.engine.sizes.width == 1
    return cache | ({"distributed_executor_backend": UniProcExecutor} if alone else {})


REQUIRED = {
    "vllm.v1.engine.async_llm": (
        "AsyncLLM.generate(prompt, sampling_params, request_id, lora_request)",
        "AsyncLLM.collective_rpc(method, args)",
        "AsyncLLM.abort(request_id)",
        "AsyncLLM.reset_prefix_cache",
        "AsyncLLM.reset_encoder_cache",
        "AsyncLLM.tokenizer",
        "AsyncLLM.add_lora(lora_request)",
        "AsyncLLM.remove_lora(lora_id)",
    ),
    "vllm.engine.arg_utils": (
        "AsyncEngineArgs(worker_extension_cls, weight_transfer_config, logprobs_mode)",
        "AsyncEngineArgs(kv_cache_memory_bytes)",
    ),
    "vllm.sampling_params": ("SamplingParams(flat_logprobs, output_kind)",),
    "vllm.model_executor.model_loader.reload": (
        "initialize_layerwise_reload(model)",
        "finalize_layerwise_reload",
    ),
    "vllm.distributed.weight_transfer": (
        "WeightTransferEngine(config, vllm_config, device, model)",
        "WeightTransferEngineFactory.register_engine(name, module_path_or_cls)",
    ),
    "vllm.v1.worker.gpu_worker": (
        "Worker.init_weight_transfer_engine(init_info)",
        "Worker.start_weight_update",
        "Worker.update_weights(update_info)",
        "Worker.finish_weight_update",
    ),
    "vllm.config": ("set_current_vllm_config(vllm_config)",),
    "vllm.v1.engine.utils": ("get_mp_context",),
}
"""Module -> its attributes that we use, with the parameters that we pass by name or position."""

KEEPING = {
    "vllm.v1.engine.async_llm": (
        "AsyncLLM.pause_generation(mode, clear_cache)",
        "AsyncLLM.resume_generation",
        "AsyncLLM.update_weight_version(new_version)",
    ),
    "vllm.outputs": ("CompletionOutput(weight_versions)",),
}
"""Also required for ``EngineSpec.keep_cache_on_pause``. Weight versions appeared in 0.32."""

ROUTING = {
    "vllm.engine.arg_utils": ("AsyncEngineArgs(enable_return_routed_experts)",),
    "vllm.outputs": ("CompletionOutput(routed_experts)",),
}
"""Also required for ``EngineSpec.routes``."""


def missing_features(
    required: Mapping[str, Sequence[str]] = REQUIRED, load: Callable[[str], Any] = import_module
) -> list[str]:
    """Return the ``required`` features that the installed vLLM lacks. ``load`` imports a module."""
    missing = []
    for module, feature in (
        (m, feature) for m, features in required.items() for feature in features
    ):
        path, _, parameters = feature.rstrip(")").partition("(")
        try:
            found = load(module)
            for name in path.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError):
            missing.append(f"{module}.{path}")
            continue
        known = signature(found).parameters if parameters else {}
        needed = parameters.split(", ") if parameters else []
        missing += [f"{path}({name})" for name in needed if name not in known]
    return missing
