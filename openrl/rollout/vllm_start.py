"""Starts vLLM: sets its environment and derives the fields of its ``EngineArgs`` from a spec."""

from __future__ import annotations

import ast
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from openrl.errors import UserError
from openrl.models.causal_lm import DTYPES
from openrl.rollout.engine import EngineSpec
from openrl.rollout.vllm_adapters import room_for_rank
from openrl.rollout.vllm_features import KEEPING, REQUIRED, missing_features

_UNBOUND = "nobind"  # vLLM's value for threads that may run on any core
_SMALLEST_BLOCK = 32  # tokens, for attention on a CPU


def _set_environment(spec: EngineSpec) -> None:
    """Set what vLLM reads only from the environment. Must run before vLLM is first imported. The
    user's own values take precedence."""
    on_cpu = spec.device == "cpu"
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        # on a CPU it warns about every missing accelerator
        "VLLM_LOGGING_LEVEL": "ERROR" if on_cpu else "WARNING",
    }
    if spec.spans_nodes:
        # Ray has set it to "", since Ray's workers have the GPUs and this process has none
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        defaults["VLLM_HOST_IP"] = "127.0.0.1"
    if on_cpu:
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
        # the model runs eagerly anyway; this leaves one helper that counts log-probs, and compiling
        # it would take ten seconds of each start
        defaults["TORCH_COMPILE_DISABLE"] = "1"
        # vLLM's own binding puts all engines of a machine on the same cores, so we set the number
        # of threads instead (Ray's default is 1). One core stays free for the other processes.
        if "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = _UNBOUND
            cores = len(os.sched_getaffinity(0)) - 1
            os.environ["OMP_NUM_THREADS"] = str(
                max(1, cores // (spec.engines_per_machine * spec.sizes.width))
            )
    else:
        if spec.dtype == "fp32":
            # attention in TF32 deviates by 1e-2 from the trainer's
            defaults["TRITON_F32_DEFAULT"] = "ieee"
        if _older_than(0, 32):
            # its V2 model runner allocates cache state in memory that sleep discards (vLLM #53343),
            # and divides logits by the temperature in bf16
            defaults["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _older_than(*release: int) -> bool:
    """Return whether the installed vLLM is older than ``release``, without importing it."""
    with suppress(PackageNotFoundError, ValueError):
        return tuple(map(int, version("vllm").split(".")[:2])) < release
    return False


def start_llm(spec: EngineSpec) -> Any:
    """Start vLLM's ``AsyncLLM`` with the settings of ``spec``. Raises UserError if this vLLM lacks
    a feature that we need, and whatever vLLM raises."""
    _set_environment(spec)
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
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(spec)))


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the fields of vLLM's ``EngineArgs``. Fields that are not named keep vLLM's
    defaults."""
    chosen: dict[str, Any] = {
        "max_num_seqs": 1 if spec.deterministic else spec.max_num_seqs,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "block_size": block_size(spec),
        "quantization": spec.quantization,
    }
    fixed = {
        "model": spec.model,
        "tokenizer": spec.tokenizer,
        "dtype": str(DTYPES[spec.dtype]).removeprefix("torch."),
        "max_model_len": spec.max_model_len,
        "seed": spec.seed,
        "load_format": spec.load_format,
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        # compiled graphs of the CPU backend keep the packed weights they were traced with, so a
        # sync would not reach them
        "enforce_eager": spec.enforce_eager or spec.device == "cpu",
        "enable_prefix_caching": spec.enable_prefix_caching and not spec.deterministic,
        "trust_remote_code": spec.trust_remote_code,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "openrl.rollout.vllm_worker.WorkerExtension",
        # registered by ``vllm_transfer``, as its BACKEND
        "weight_transfer_config": {"backend": "openrl"},
        "enable_sleep_mode": spec.sleep_level > 0 and spec.device == "cuda",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "hf_overrides": spec.config_overrides,
    }
    if spec.max_images:
        chosen |= {
            "limit_mm_per_prompt": {"image": spec.max_images},
            "mm_processor_kwargs": spec.processor_kwargs or None,
        }
    if spec.adapter_rank:  # reserve room for the adapter in use and, during a sync, its successor
        chosen |= {
            "enable_lora": True,
            "max_lora_rank": room_for_rank(spec.adapter_rank),
            "max_cpu_loras": 2,
        }
    given = {name: value for name, value in chosen.items() if value is not None}
    cpu = _cpu_arguments(spec) if spec.device == "cpu" else {}
    return fixed | given | _parallel_arguments(spec) | cpu | spec.engine_kwargs


def block_size(spec: EngineSpec) -> int | None:
    """Return the tokens of a block of the cache, or None for vLLM's default. On a CPU that is 128,
    and only full blocks are reused, so a cached prefix would need 128 tokens to save anything."""
    if spec.block_size is None and spec.device == "cpu" and spec.enable_prefix_caching:
        return _SMALLEST_BLOCK
    return spec.block_size


def _parallel_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the fields that split the model. They always name the executor: inside a Ray actor
    vLLM would otherwise choose the Ray executor and claim the actor's GPUs."""
    if spec.sizes.width == 1:
        return {}
    return {
        "tensor_parallel_size": spec.sizes.tensor,
        "pipeline_parallel_size": spec.sizes.pipeline,
        "data_parallel_size": spec.sizes.data,
        "enable_expert_parallel": spec.expert_parallel,
        "distributed_executor_backend": "ray" if spec.spans_nodes else "mp",
    }


def engine_fields() -> frozenset[str]:
    """Return the field names of vLLM's EngineArgs, read from its source, since importing vLLM takes
    seconds and changes the process. Raises UserError if vLLM is not installed."""
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise UserError("vLLM is not installed", "pip install vllm")
    source = Path(found.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    return frozenset(
        statement.target.id
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )


def _cpu_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the fields for an engine on a CPU.

    Unless threads are bound to cores, the model runs in the scheduler's process. vLLM's default, a
    separate worker process, keeps two cores busy: each process spins while the other computes, and
    the worker for a second longer.

    Prompts are computed whole if they fit. For a partial prompt vLLM rewinds the random generator
    by an offset, which CPU generators lack, so a request with a seed would crash the engine."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    cache = {
        "kv_cache_memory_bytes": int(spec.kv_cache_gb * 2**30),
        "enable_chunked_prefill": (spec.max_num_batched_tokens or 2**31) < spec.max_model_len,
    }
    alone = os.environ["VLLM_CPU_OMP_THREADS_BIND"] == _UNBOUND and spec.sizes.width == 1
    return cache | ({"distributed_executor_backend": UniProcExecutor} if alone else {})
