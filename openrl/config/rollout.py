"""Flags of placement and engines."""

from __future__ import annotations

from typing import Any, Literal

from openrl.config.conditions import (
    CRITIC,
    CRITIC_AND_REWARD,
    FROZEN_MODEL,
    LAUNCHER,
    RAY,
    REFERENCE,
    SECOND_REFERENCE,
    VLLM,
)
from openrl.flags.schema import absent, flag, given, group

SleepState = Literal["param", "optim", "grad"]


@group("Placement")
class ClusterFlags:
    ray_address: str | None = flag(
        None,
        "Ray cluster to join. None: $RAY_ADDRESS; without it, a cluster starts and stops with the"
        " run.",
    )
    rpc_timeout: int = flag(
        3600,
        "Seconds to wait for a worker's answer before the run stops and names the missing"
        " workers. 0: no limit.",
        bounds=">= 0",
        only_if=RAY,
    )
    placement_timeout: int = flag(
        600,
        "Seconds to wait for the cluster to grant the placement before the run stops and says"
        " what is missing. 0: no limit.",
        bounds=">= 0",
        only_if=RAY,
    )


@group("Placement")
class PlacementFlags(ClusterFlags):
    system_envs: tuple[str, ...] = flag(
        (),
        "Environment variables for every process of the run, e.g. NCCL_DEBUG=WARN; they override"
        " openrl's own.",
    )
    actor_num_nodes: int = flag(1, "Nodes of the actor group.", bounds="> 0")
    actor_num_gpus_per_node: int | None = flag(
        None,
        "GPUs per node of the actor group; on a CPU, worker slots. None: every GPU of the node; 1"
        " on a CPU.",
        bounds="> 0",
    )
    critic_num_nodes: int | None = flag(
        None, "Nodes of the critic group. None: as the actor.", bounds="> 0", only_if=CRITIC
    )
    critic_num_gpus_per_node: int | None = flag(
        None, "GPUs per node of the critic group. None: as the actor.", bounds="> 0", only_if=CRITIC
    )
    ref_num_nodes: int | None = flag(
        None,
        "Nodes of the reference group. None: as the actor.",
        bounds="> 0",
        only_if=(REFERENCE, SECOND_REFERENCE),
    )
    ref_num_gpus_per_node: int | None = flag(
        None,
        "GPUs per node of the reference group. None: as the actor.",
        bounds="> 0",
        only_if=(REFERENCE, SECOND_REFERENCE),
    )
    reward_num_nodes: int | None = flag(
        None,
        "Nodes of the reward group. None: as the actor.",
        bounds="> 0",
        only_if=given("reward_pretrain"),
    )
    reward_num_gpus_per_node: int | None = flag(
        None,
        "GPUs per node of the reward group. None: as the actor.",
        bounds="> 0",
        only_if=given("reward_pretrain"),
    )
    placement: str | None = flag(
        None,
        'Explicit places of every role, e.g. "actor=0-3;ref=0-3;vllm=4-7"; roles with common'
        " numbers share these places. A place is a GPU, numbered across nodes, or on a CPU a"
        " worker slot.",
    )


@group("Placement")
class RankFlags(ClusterFlags):
    """Where the ranks of a command with one model run: in this process alone, under a launcher, or
    under Ray."""

    num_nodes: int = flag(1, "Ray nodes over which the ranks are spread.", bounds="> 0")
    num_gpus_per_node: int | None = flag(
        None,
        "Ranks per node as Ray workers, one per GPU or, on a CPU, per worker slot. None: no Ray;"
        " one rank in this process, or the ranks that torchrun started.",
        bounds="> 0",
    )
    local_rank: int = flag(
        -1,
        "Rank on this node, for launchers that pass it on the command line. -1: $LOCAL_RANK.",
        bounds=">= -1",
        only_if=LAUNCHER,
    )


@group("Hybrid engine")
class HybridFlags:
    colocate_all_models: bool = flag(
        False,
        "All models and the engines share the same GPUs; with --async_train only the models do.",
    )
    colocate_actor_ref: bool = flag(
        False, "Actor and reference share GPUs.", only_if=(REFERENCE, SECOND_REFERENCE)
    )
    colocate_critic_reward: bool = flag(
        False, "Critic and reward model share GPUs.", only_if=CRITIC_AND_REWARD
    )
    vllm_enable_sleep: bool = flag(
        False,
        "Engines free their weights and cache while models train; they wake with weights first,"
        " then sync, then the cache. On a CPU they free only the cache.",
    )
    vllm_sleep_level: Literal[1, 2] = flag(
        1,
        "1: a sleeping engine keeps a copy of its weights in host memory; 2: it drops them and"
        " gets them from the next sync.",
        only_if=(given("vllm_enable_sleep"), VLLM),
    )
    deepspeed_enable_sleep: bool = flag(
        False,
        "Move training state off the GPU while other roles use it; --deepspeed_sleep_states says"
        " which parts.",
    )
    deepspeed_sleep_states: tuple[SleepState, ...] = flag(
        ("optim", "grad"),
        "What --deepspeed_enable_sleep moves to host memory, or on a CPU to files under $TMPDIR."
        " optim: optimizer states and master weights; grad: gradient buffers, which are dropped;"
        " param: working weights.",
        only_if=given("deepspeed_enable_sleep"),
    )
    ref_reward_offload: bool = flag(
        False,
        "Keep reference and reward weights in host memory; each pass loads them layer by layer"
        " with --zero_stage 3, else whole.",
        only_if=FROZEN_MODEL,
    )

    @property
    def sleep_states(self) -> tuple[SleepState, ...]:
        """The states of a trained model that leave its device while others use it."""
        return self.deepspeed_sleep_states if self.deepspeed_enable_sleep else ()


@group("Device")
class DeviceFlags:
    device: Literal["auto", "cuda", "cpu"] = flag(
        "auto",
        "Where models run. auto: cuda if there is a GPU. cpu: gloo, and worker slots instead of"
        " GPUs.",
    )


@group("Rollout engine", only_if=VLLM)
class OneEngineFlags:
    """Settings of one engine, wherever it runs."""

    vllm_tensor_parallel_size: int = flag(
        1, "GPUs over which one engine splits each layer.", bounds="> 0"
    )
    vllm_gpu_memory_utilization: float | None = flag(
        None,
        "Share of GPU memory that one engine may use. None: 0.9 on GPUs of its own, 0.6 beside a"
        " model.",
        bounds="(0, 1]",
    )
    vllm_max_num_seqs: int | None = flag(
        None,
        "Most sequences that one engine decodes at a time. None: vLLM's default.",
        bounds="> 0",
        only_if=absent("full_determinism"),
    )
    vllm_max_num_batched_tokens: int | None = flag(
        None,
        "Most tokens that one engine processes in one step. None: vLLM's default.",
        bounds="> 0",
    )
    vllm_block_size: int | None = flag(
        None,
        "Tokens per key-value cache block; of a cached prefix full blocks alone are reused. None:"
        " vLLM's default, or with --enable_prefix_caching on a CPU 32.",
        bounds="> 0",
    )
    vllm_max_model_len: int | None = flag(
        None,
        "Most tokens of a sequence in the engine. None: those of the longest prompt and response"
        " together.",
        bounds="> 0",
    )
    vllm_dtype: Literal["auto", "bf16", "fp16", "fp32"] = flag(
        "auto", "Type that vLLM computes in. auto: --param_dtype."
    )
    vllm_quantization: Literal["fp8"] | None = flag(
        None, "Quantise the engine's weights at each sync. None: off."
    )
    vllm_engine_kwargs: dict[str, Any] = flag(
        {}, 'Other fields of vLLM\'s EngineArgs, e.g. {"enable_chunked_prefill": true}.'
    )
    enforce_eager: bool = flag(
        False, "Run vLLM without CUDA graphs: slower, but needs less memory."
    )
    enable_prefix_caching: bool = flag(
        False,
        "Reuse the key-value cache of equal prompt prefixes; the cache is emptied at each weight"
        " sync.",
        only_if=absent("full_determinism"),
    )


@group("Rollout engine")
class ChosenEngineFlags(OneEngineFlags):
    rollout_backend: Literal["vllm", "hf"] = flag(
        "vllm", "Engine that generates: vllm, or hf, transformers generation in a worker."
    )


@group("Rollout engine", only_if=VLLM)
class SyncedEngineFlags(ChosenEngineFlags):
    """vLLM in a training run."""

    vllm_pipeline_parallel_size: int = flag(
        1,
        "Pipeline stages of one engine; GPUs per engine = tensor * pipeline * data.",
        bounds="> 0",
    )
    vllm_data_parallel_size: int = flag(
        1,
        "Data-parallel replicas in one engine, for mixtures of experts with"
        " --vllm_enable_expert_parallel.",
        bounds="> 0",
    )
    vllm_enable_expert_parallel: bool = flag(
        False,
        "Split the experts of a mixture over the engine's GPUs instead of splitting each expert.",
    )
    vllm_load_format: Literal["auto", "safetensors", "dummy"] = flag(
        "auto",
        "How vLLM first loads weights. dummy: random weights, which saves a read; the first sync"
        " replaces them before the first rollout.",
    )
    vllm_sync_backend: Literal["nccl", "gloo"] | None = flag(
        None,
        "How weights reach engines: nccl from GPU to GPU (CUDA IPC on a shared GPU), gloo through"
        " host memory. None: nccl, or gloo on a CPU.",
    )


@group("Rollout engine")
class EngineFlags(SyncedEngineFlags):
    """The engines of a training run."""

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


@group("Rollout engine")
class CollectFlags:
    """How requests reach the engines, of whatever kind."""

    vllm_generate_batch_size: int | None = flag(
        None,
        "Most prompts running or accepted while a rollout is filled. None: --rollout_batch_size."
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
        "Directory for the complete answers of every step and evaluation, to read or for"
        " --rollout_replay_dir. None: not written.",
    )
    rollout_replay_dir: str | None = flag(
        None,
        "Train on the answers that another run wrote to its --rollout_dump_dir, without engines"
        " or rewards; equal flags give equal weights. None: generate answers.",
    )
