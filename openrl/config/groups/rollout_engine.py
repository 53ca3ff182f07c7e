"""Flags of rollout engines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from openrl.config.conditions import VLLM
from openrl.errors import UserError, counted
from openrl.flags.schema import Condition, absent, flag, group


@dataclass(frozen=True)
class ParallelSizes:
    """How one engine divides a model over its places; neighbours form a tensor-parallel group."""

    tensor: int = 1  # ranks that share every layer
    pipeline: int = 1  # stages of layers
    data: int = 1  # replicas behind one front end

    @property
    def width(self) -> int:
        """How many places one engine takes."""
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        """Name only what is divided, e.g. "tensor 2 x pipeline 2"."""
        return " x ".join(f"{name} {n}" for name, n in vars(self).items() if n > 1) or "one place"

    def check_fill(self, places: int, engines: int | None, given_by: str) -> None:
        """Raise UserError unless whole engines fill the places that the flag ``given_by`` gives
        them, and ``engines`` of them if that is not None."""
        each = "one place" if self.width == 1 else f"{self.width} places ({self})"
        if places % self.width:
            raise UserError(
                f"{counted(places, 'place')} cannot be divided into engines of {each} each",
                "sizes that divide evenly",
                (given_by, "vllm_tensor_parallel_size"),
            )
        fit = places // self.width
        if engines is not None and engines != fit:
            these = counted(engines, "engine")
            raise UserError(
                f"{these} of {each} each cannot fill {counted(places, 'place')}",
                f"--vllm_num_engines {fit}",
                (given_by, "vllm_num_engines"),
            )


of_vllm = partial(flag, only_if=VLLM)


@group("Rollout engine")
class OneEngineFlags:
    """Settings of one engine, wherever it runs."""

    vllm_tensor_parallel_size: int = of_vllm(
        1, "GPUs over which one engine splits each layer.", bounds="> 0", alias=("tp_size",)
    )
    vllm_gpu_memory_utilization: float | None = of_vllm(
        None,
        "Share of GPU memory that one engine may use. None: 0.9 on GPUs of its own, 0.6 beside a"
        " model.",
        bounds="(0, 1]",
    )
    vllm_max_num_seqs: int | None = flag(
        None,
        "Most sequences that one engine decodes at a time. None: vLLM's default.",
        bounds="> 0",
        alias=("max_num_seqs",),
        only_if=(VLLM, absent("full_determinism")),
    )
    vllm_max_num_batched_tokens: int | None = of_vllm(
        None,
        "Most tokens that one engine processes in one step. None: vLLM's default.",
        bounds="> 0",
    )
    vllm_block_size: int | None = of_vllm(
        None,
        "Tokens per key-value cache block; of a cached prefix full blocks alone are reused. None:"
        " vLLM's default, or with --enable_prefix_caching on a CPU 32.",
        bounds="> 0",
    )
    vllm_max_model_len: int | None = of_vllm(
        None,
        "Most tokens of a sequence in the engine. None: those of the longest prompt and response"
        " together.",
        bounds="> 0",
    )
    vllm_dtype: Literal["auto", "bf16", "fp16", "fp32"] = of_vllm(
        "auto", "Type that vLLM computes in. auto: --param_dtype."
    )
    vllm_quantization: Literal["fp8"] | None = of_vllm(
        None, "Quantise the engine's weights at each sync. None: off."
    )
    vllm_engine_kwargs: dict[str, Any] = of_vllm(
        {},
        'Other fields of vLLM\'s EngineArgs, e.g. {"enable_chunked_prefill": true}.',
        may_hold_secrets=True,
    )
    enforce_eager: bool = of_vllm(
        False, "Run vLLM without CUDA graphs: slower, but needs less memory."
    )
    enable_prefix_caching: bool = flag(
        False,
        "Reuse the key-value cache of equal prompt prefixes; the cache is emptied at each weight"
        " sync.",
        only_if=(VLLM, absent("full_determinism")),
    )

    @property
    def sizes(self) -> ParallelSizes:
        return ParallelSizes(self.vllm_tensor_parallel_size)


@group("Rollout engine")
class ChosenEngineFlags(OneEngineFlags):
    rollout_backend: Literal["vllm", "hf"] = flag(
        "vllm", "Engine that generates: vllm, or hf, transformers generation in a worker."
    )


@group("Rollout engine")
class EngineFlags(ChosenEngineFlags):
    """The engines of a training run."""

    vllm_pipeline_parallel_size: int = of_vllm(
        1,
        "Pipeline stages of one engine; GPUs per engine = tensor * pipeline * data.",
        bounds="> 0",
    )
    vllm_data_parallel_size: int = of_vllm(
        1,
        "Data-parallel replicas in one engine, for mixtures of experts with"
        " --vllm_enable_expert_parallel.",
        bounds="(0, 256]",
    )
    vllm_enable_expert_parallel: bool = flag(
        False,
        "Split the experts of a mixture over the engine's GPUs instead of splitting each expert.",
        only_if=(
            VLLM,
            Condition(lambda config: config.engine.sizes.width > 1, "with several GPUs"),
        ),
    )
    vllm_load_format: Literal["auto", "safetensors", "dummy"] = of_vllm(
        "auto",
        "How vLLM first loads weights. dummy: random weights, which saves a read; the first sync"
        " replaces them before the first rollout.",
    )
    vllm_sync_backend: Literal["nccl", "gloo"] | None = of_vllm(
        None,
        "How weights reach engines: nccl from GPU to GPU (CUDA IPC on a shared GPU), gloo through"
        " host memory. None: nccl, or gloo on a CPU.",
    )
    vllm_num_engines: int | None = flag(
        None,
        "Number of engines. None: enough to fill the places that --colocate_all_models or"
        " --placement gives them, else 1.",
        bounds="(0, 4096]",
    )
    weight_sync_interval: int = flag(
        1,
        "Send weights to the engines every N training steps, and before an evaluation or a"
        " checkpoint. N > 1 makes rollouts up to N-1 steps older.",
        bounds="> 0",
        only_if=absent("eval_only"),
    )
    sync_bucket_mb: int = flag(
        512,
        "MiB of weights gathered and sent in one call; it may reach twice that, or one larger"
        " tensor.",
        bounds="> 0",
    )
    check_weight_sync: bool = flag(
        False,
        "Send a checksum with every tensor and compare it when the tensor is loaded; costs one"
        " more read of all weights.",
    )

    @property
    def sizes(self) -> ParallelSizes:
        """How an engine is divided; one of transformers never is."""
        if self.rollout_backend == "hf":
            return ParallelSizes()
        return ParallelSizes(
            self.vllm_tensor_parallel_size,
            self.vllm_pipeline_parallel_size,
            self.vllm_data_parallel_size,
        )


@group("Rollout engine")
class CollectFlags:
    """How requests reach the engines, of whatever kind."""

    vllm_generate_batch_size: int | None = flag(
        None,
        "Upper bound on prompts in flight plus accepted per rollout. None: --rollout_batch_size."
        " More: once enough are complete, the slowest are dropped and counted. Fewer: rounds of"
        " this many, with --dynamic_filtering.",
        bounds="> 0",
    )
    vllm_max_inflight_per_engine: int = flag(
        0, "Most requests sent to one engine at a time; others wait. 0: no limit.", bounds=">= 0"
    )
    rollout_scheduler: Literal["stream", "batch"] = flag(
        "stream",
        "stream: each group is scored, filtered and replaced as soon as it finishes. batch: once"
        " all have finished, in the order of the prompts.",
    )
    rollout_dump_dir: str | None = flag(
        None,
        "Keep the whole trace in this directory: every answer of every step and evaluation, as with"
        " --trace_sample_rate 1. None: SAVE_PATH/trace.",
    )
    rollout_replay_dir: str | None = flag(
        None,
        "Train on the answers in the trace of another run, without engines or rewards: its"
        " --save_path, with --trace_sample_rate 1, or its --rollout_dump_dir. Equal flags give"
        " equal weights. None: generate answers.",
    )

    @property
    def replays(self) -> bool:
        """Whether scored rollouts come from files; there are no engines then."""
        return self.rollout_replay_dir is not None
