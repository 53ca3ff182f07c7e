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
        "Ray cluster to join. None: $RAY_ADDRESS, else one is started and stopped with the run.",
    )
    rpc_timeout: int = flag(
        3600,
        "Seconds to wait for any answer of a worker; then the missing ones are named and the run"
        " stops. 0: no limit.",
        bounds=">= 0",
        only_if=RAY,
    )
    placement_timeout: int = flag(
        600,
        "Seconds to wait for the cluster to grant the placement; then an error says what is"
        " missing. 0: no limit.",
        bounds=">= 0",
        only_if=RAY,
    )


@group("Placement")
class PlacementFlags(ClusterFlags):
    system_envs: tuple[str, ...] = flag(
        (),
        "Environment variables set in every process of the run, e.g. NCCL_DEBUG=WARN; they go"
        " before our defaults.",
    )
    actor_num_nodes: int = flag(1, "Nodes of the actor group.", bounds="> 0")
    actor_num_gpus_per_node: int | None = flag(
        None,
        "GPUs per node of the actor group. None: every GPU of the node; 1 on a CPU, where it counts"
        " worker slots.",
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
        'Explicit places of every role, e.g. "actor=0-3;ref=0-3;vllm=4-7"; roles that share numbers'
        " are colocated. A place is a GPU, counted through the nodes, or a worker slot.",
    )


@group("Placement")
class RankFlags(ClusterFlags):
    """Where the ranks of a command with one model run: in this process alone, under a launcher, or
    under Ray."""

    num_nodes: int = flag(1, "Nodes of Ray that the ranks are spread over.", bounds="> 0")
    num_gpus_per_node: int | None = flag(
        None,
        "Ranks on each node, as workers of Ray: GPUs, or worker slots on a CPU. None: one rank in"
        " this process, or those that torchrun started, without Ray.",
        bounds="> 0",
    )
    local_rank: int = flag(
        -1,
        "Set by launchers that give it on the command line. -1: $LOCAL_RANK.",
        bounds=">= -1",
        only_if=LAUNCHER,
    )


@group("Hybrid engine")
class HybridFlags:
    colocate_all_models: bool = flag(
        False, "All models and the engines share the same GPUs; with --async_train all models."
    )
    colocate_actor_ref: bool = flag(
        False, "Actor and reference share GPUs.", only_if=(REFERENCE, SECOND_REFERENCE)
    )
    colocate_critic_reward: bool = flag(
        False, "Critic and reward model share GPUs.", only_if=CRITIC_AND_REWARD
    )
    vllm_enable_sleep: bool = flag(
        False,
        "Engines free weights and cache while models train; woken in two stages: weights, sync,"
        " then cache. On a CPU the cache alone is freed.",
    )
    vllm_sleep_level: Literal[1, 2] = flag(
        1,
        "1 keeps a copy of the engine's weights in host memory; 2 drops them and relies on the next"
        " sync.",
        only_if=(given("vllm_enable_sleep"), VLLM),
    )
    deepspeed_enable_sleep: bool = flag(
        False,
        "Training state leaves the GPU while others use it; --deepspeed_sleep_states says which"
        " parts.",
    )
    deepspeed_sleep_states: tuple[SleepState, ...] = flag(
        ("optim", "grad"),
        "What --deepspeed_enable_sleep moves to host memory, on a CPU to files under $TMPDIR: optim"
        " is optimizer states and masters, grad gradient buffers, which are dropped, param working"
        " weights.",
        only_if=given("deepspeed_enable_sleep"),
    )
    ref_reward_offload: bool = flag(
        False,
        "Reference and reward weights wait in host memory: with --zero_stage 3 they are streamed in"
        " layer by layer, else whole for each of their passes.",
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
        "Where models run. auto: cuda if there is one. cpu: gloo and worker slots instead of GPUs.",
    )


@group("Rollout engine", only_if=VLLM)
class OneEngineFlags:
    """Settings of one engine, wherever it runs."""

    vllm_tensor_parallel_size: int = flag(
        1, "GPUs over which one engine splits its tensors.", bounds="> 0"
    )
    vllm_gpu_memory_utilization: float | None = flag(
        None,
        "Share of GPU memory one engine may take, 0 to 1. None: 0.9 on GPUs of its own, 0.6 beside"
        " a model.",
        bounds="(0, 1]",
    )
    vllm_max_num_seqs: int | None = flag(
        None,
        "Sequences one engine decodes at a time. None: vLLM's default.",
        bounds="> 0",
        only_if=absent("full_determinism"),
    )
    vllm_max_num_batched_tokens: int | None = flag(
        None, "Tokens one engine processes in one step. None: vLLM's default.", bounds="> 0"
    )
    vllm_block_size: int | None = flag(
        None, "Tokens per key-value cache block. None: vLLM's default.", bounds="> 0"
    )
    vllm_max_model_len: int | None = flag(
        None,
        "Longest sequence the engine accepts. None: the longest prompt and response together.",
        bounds="> 0",
    )
    vllm_dtype: Literal["auto", "bf16", "fp16", "fp32"] = flag(
        "auto", "Type vLLM computes in. auto: --param_dtype."
    )
    vllm_quantization: Literal["fp8"] | None = flag(
        None, "Quantise the engine's weights at each sync. None: no."
    )
    vllm_engine_kwargs: dict[str, Any] = flag(
        {}, 'Any other field of vLLM\'s EngineArgs, e.g. {"enable_chunked_prefill": true}.'
    )
    enforce_eager: bool = flag(False, "Run vLLM without CUDA graphs: less memory, slower.")
    enable_prefix_caching: bool = flag(
        False,
        "Reuse the key-value cache of equal prompt prefixes; emptied after each weight sync.",
        only_if=absent("full_determinism"),
    )


@group("Rollout engine")
class ChosenEngineFlags(OneEngineFlags):
    rollout_backend: Literal["vllm", "hf"] = flag(
        "vllm", "Engine that generates: vLLM, or transformers generation in a worker."
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
        "Data-parallel replicas inside one engine, for mixtures of experts with"
        " --vllm_enable_expert_parallel.",
        bounds="> 0",
    )
    vllm_enable_expert_parallel: bool = flag(
        False,
        "Split the experts of a mixture over the engine's GPUs instead of splitting each expert.",
    )
    vllm_load_format: Literal["auto", "safetensors", "dummy"] = flag(
        "auto",
        "How vLLM first loads weights. dummy: random ones, since the first sync comes before the"
        " first rollout; saves a read.",
    )
    vllm_sync_backend: Literal["nccl", "gloo"] | None = flag(
        None,
        "How weights reach engines: nccl from GPU to GPU (CUDA IPC where they share one), gloo"
        " through host memory. None: nccl, and gloo on a CPU.",
    )


@group("Rollout engine")
class EngineFlags(SyncedEngineFlags):
    """The engines of a training run."""

    vllm_num_engines: int | None = flag(
        None,
        "Number of engines. None: as many as fill the places that --colocate_all_models or"
        " --placement gives them, else 1.",
        bounds="(0, 4096]",
    )
    weight_sync_interval: int = flag(
        1,
        "Send weights to the engines after every N-th training step, and before an evaluation or a"
        " checkpoint. N > 1 makes rollouts up to N-1 steps older.",
        bounds="> 0",
        only_if=absent("eval_only"),
    )
    sync_bucket_mb: int = flag(
        512,
        "MiB of weights gathered and sent in one call; twice as much at most, or one larger"
        " tensor.",
        bounds="> 0",
    )
    check_weight_sync: bool = flag(
        False,
        "Send a checksum with every tensor and compare it where the tensor is loaded; one more read"
        " of all weights.",
    )


@group("Rollout engine")
class CollectFlags:
    """How requests reach the engines, of whatever kind."""

    vllm_generate_batch_size: int | None = flag(
        None,
        "Prompts running or already accepted at any time while a rollout is filled. None:"
        " --rollout_batch_size. More: the slowest are given up when there are enough, and counted."
        " Fewer: rounds of so many, with --dynamic_filtering.",
        bounds="> 0",
    )
    vllm_max_inflight_per_engine: int = flag(
        0, "Most requests sent to one engine at a time; others wait. 0: no limit.", bounds=">= 0"
    )
    rollout_scheduler: Literal["stream", "batch"] = flag(
        "stream",
        "stream: each group is scored, judged and replaced when it finishes. batch: when all have,"
        " in the order of prompts.",
    )
    rollout_dump_dir: str | None = flag(
        None,
        "Directory for the answers of every step and evaluation, whole, for reading and for"
        " --rollout_replay_dir. None: none.",
    )
    rollout_replay_dir: str | None = flag(
        None,
        "Train on the answers that --rollout_dump_dir has kept of another run: no engine and no"
        " reward is started, and equal flags give equal weights. None: play prompts.",
    )
