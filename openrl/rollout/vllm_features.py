"""The features of vLLM that openrl relies on. They are looked up by name before an engine starts.

The supported versions are 0.26 to 0.32; the tests run on 0.32. Of vLLM's weight transfer we use
only the worker side, which is the same in all of them. The trainer side, which changes from version
to version, is our own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from inspect import signature
from typing import Any

Feature = tuple[str, str, tuple[str, ...]]
"""(module, attribute, parameters that we pass by name or position)"""

REQUIRED: tuple[Feature, ...] = (
    (
        "vllm.v1.engine.async_llm",
        "AsyncLLM.generate",
        ("prompt", "sampling_params", "request_id", "lora_request"),
    ),
    ("vllm.v1.engine.async_llm", "AsyncLLM.collective_rpc", ("method", "args")),
    ("vllm.v1.engine.async_llm", "AsyncLLM.abort", ("request_id",)),
    ("vllm.v1.engine.async_llm", "AsyncLLM.reset_prefix_cache", ()),
    ("vllm.v1.engine.async_llm", "AsyncLLM.reset_encoder_cache", ()),
    ("vllm.v1.engine.async_llm", "AsyncLLM.tokenizer", ()),
    ("vllm.v1.engine.async_llm", "AsyncLLM.add_lora", ("lora_request",)),
    ("vllm.v1.engine.async_llm", "AsyncLLM.remove_lora", ("lora_id",)),
    (
        "vllm.engine.arg_utils",
        "AsyncEngineArgs",
        (
            "worker_extension_cls",
            "weight_transfer_config",
            "logprobs_mode",
            "kv_cache_memory_bytes",
        ),
    ),
    ("vllm.sampling_params", "SamplingParams", ("flat_logprobs", "output_kind")),
    ("vllm.model_executor.model_loader.reload", "initialize_layerwise_reload", ("model",)),
    ("vllm.model_executor.model_loader.reload", "finalize_layerwise_reload", ()),
    (
        "vllm.distributed.weight_transfer",
        "WeightTransferEngine",
        ("config", "vllm_config", "device", "model"),
    ),
    (
        "vllm.distributed.weight_transfer",
        "WeightTransferEngineFactory.register_engine",
        ("name", "module_path_or_cls"),
    ),
    ("vllm.v1.worker.gpu_worker", "Worker.init_weight_transfer_engine", ("init_info",)),
    ("vllm.v1.worker.gpu_worker", "Worker.start_weight_update", ()),
    ("vllm.v1.worker.gpu_worker", "Worker.update_weights", ("update_info",)),
    ("vllm.v1.worker.gpu_worker", "Worker.finish_weight_update", ()),
    ("vllm.config", "set_current_vllm_config", ("vllm_config",)),
    ("vllm.v1.engine.utils", "get_mp_context", ()),
)

KEEPING: tuple[Feature, ...] = (
    ("vllm.v1.engine.async_llm", "AsyncLLM.pause_generation", ("mode", "clear_cache")),
    ("vllm.v1.engine.async_llm", "AsyncLLM.resume_generation", ()),
    ("vllm.v1.engine.async_llm", "AsyncLLM.update_weight_version", ("new_version",)),
    ("vllm.outputs", "CompletionOutput", ("weight_versions",)),
)
"""Also required for ``EngineSpec.keep_cache_on_pause``. Weight versions appeared in 0.32."""


def missing_features(
    required: Iterable[Feature] = REQUIRED, load: Callable[[str], Any] = import_module
) -> list[str]:
    """Return descriptions of the ``required`` features that the installed vLLM lacks. ``load``
    imports a module by name."""
    missing = []
    for module, path, parameters in required:
        try:
            found = load(module)
            for name in path.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError):
            missing.append(f"{module}.{path}")
            continue
        known = signature(found).parameters if parameters else {}
        missing += [f"{path}({name})" for name in parameters if name not in known]
    return missing
