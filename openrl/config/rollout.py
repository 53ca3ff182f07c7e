"""Flags of placement, engines and sampling."""

from __future__ import annotations

from typing import Any, Literal

from openrl.flags.schema import flag, group


@group("Placement")
class ClusterFlags:
    ray_address: str | None = flag(
        None, "Ray cluster to join. None: $RAY_ADDRESS, else one is started and stopped with the run."
    )
    rpc_timeout: int = flag(
        3600,
        "Seconds to wait for any answer of a worker; then the missing ones are named and the run stops.",
        bounds="> 0",
    )
    placement_timeout: int = flag(
        600, "Seconds to wait for the cluster to grant the placement; then an error says what is missing.", bounds="> 0"
    )


@group("Placement")
class PlacementFlags(ClusterFlags):
    actor_num_nodes: int = flag(1, "Nodes of the actor group.", bounds="> 0")
    actor_num_gpus_per_node: int | None = flag(
        None,
        "GPUs per node of the actor group. None: every GPU of the node; 1 on a CPU, where it counts worker slots.",
        bounds="> 0",
    )
    critic_num_nodes: int | None = flag(None, "Nodes of the critic group. None: as the actor.", bounds="> 0")
    critic_num_gpus_per_node: int | None = flag(
        None, "GPUs per node of the critic group. None: as the actor.", bounds="> 0"
    )
    ref_num_nodes: int | None = flag(None, "Nodes of the reference group. None: as the actor.", bounds="> 0")
    ref_num_gpus_per_node: int | None = flag(
        None, "GPUs per node of the reference group. None: as the actor.", bounds="> 0"
    )
    reward_num_nodes: int | None = flag(None, "Nodes of the reward group. None: as the actor.", bounds="> 0")
    reward_num_gpus_per_node: int | None = flag(
        None, "GPUs per node of the reward group. None: as the actor.", bounds="> 0"
    )
    placement: str | None = flag(
        None,
        'Explicit places of every role, e.g. "actor=0-3;ref=0-3;vllm=4-7"; roles that share numbers are colocated. '
        "A place is a GPU, counted through the nodes, or a worker slot.",
    )


@group("Placement")
class RankFlags(ClusterFlags):
    """Where the ranks of a command with one model are: in this process alone, under a launcher, or under Ray."""

    num_nodes: int = flag(1, "Nodes of Ray that the ranks are spread over.", bounds="> 0")
    num_gpus_per_node: int | None = flag(
        None,
        "Ranks on each node, as workers of Ray: GPUs, or worker slots on a CPU. None: one rank in this process, or those "
        "that torchrun started, without Ray.",
        bounds="> 0",
    )
    local_rank: int = flag(-1, "Set by launchers that give it on the command line. -1: $LOCAL_RANK.", bounds=">= -1")


@group("Hybrid engine")
class HybridFlags:
    colocate_all_models: bool = flag(False, "All models and the engines share the same GPUs.")
    colocate_actor_ref: bool = flag(False, "Actor and reference share GPUs.")
    colocate_critic_reward: bool = flag(False, "Critic and reward model share GPUs.")


@group("Device")
class DeviceFlags:
    device: Literal["auto", "cuda", "cpu"] = flag(
        "auto", "Where models run. auto: cuda if there is one. cpu: gloo and worker slots instead of GPUs."
    )


@group("Rollout engine")
class OneEngineFlags:
    """What one engine is told, wherever it runs."""

    vllm_tensor_parallel_size: int = flag(1, "GPUs over which one engine splits its tensors.", bounds="> 0")
    vllm_gpu_memory_utilization: float = flag(0.9, "Share of GPU memory one engine may take, 0 to 1.", bounds="(0, 1]")
    vllm_max_num_seqs: int | None = flag(
        None, "Sequences one engine decodes at a time. None: vLLM's default.", bounds="> 0"
    )
    vllm_max_num_batched_tokens: int | None = flag(
        None, "Tokens one engine processes in one step. None: vLLM's default.", bounds="> 0"
    )
    vllm_block_size: int | None = flag(None, "Tokens per key-value cache block. None: vLLM's default.", bounds="> 0")
    vllm_max_model_len: int | None = flag(
        None, "Longest sequence the engine accepts. None: the longest prompt and response together.", bounds="> 0"
    )
    vllm_dtype: Literal["auto", "bf16", "fp16", "fp32"] = flag("auto", "Type vLLM computes in. auto: --param_dtype.")
    vllm_quantization: Literal["fp8"] | None = flag(None, "Quantise the engine's weights at each sync. None: no.")
    vllm_engine_kwargs: dict[str, Any] = flag(
        {}, 'Any other field of vLLM\'s EngineArgs, e.g. {"enable_chunked_prefill": true}.'
    )
    enforce_eager: bool = flag(False, "Run vLLM without CUDA graphs: less memory, slower.")
    enable_prefix_caching: bool = flag(
        False, "Reuse the key-value cache of equal prompt prefixes; emptied after each weight sync."
    )


@group("Rollout engine")
class ChosenEngineFlags(OneEngineFlags):
    rollout_backend: Literal["vllm", "hf"] = flag(
        "vllm", "Engine that generates: vLLM, or transformers generation in a worker."
    )


@group("Rollout engine")
class EngineFlags(ChosenEngineFlags):
    """The engines of a run that trains."""

    vllm_num_engines: int | None = flag(
        None,
        "Number of engines. None: as many as fill the places that --colocate_all_models or --placement gives them, else 1.",
        bounds="> 0",
    )
    vllm_pipeline_parallel_size: int = flag(
        1, "Pipeline stages of one engine; GPUs per engine = tensor * pipeline * data.", bounds="> 0"
    )
    vllm_data_parallel_size: int = flag(
        1,
        "Data-parallel replicas inside one engine, for mixtures of experts with --vllm_enable_expert_parallel.",
        bounds="> 0",
    )
    vllm_enable_expert_parallel: bool = flag(
        False, "Split the experts of a mixture over the engine's GPUs instead of splitting each expert."
    )
    vllm_load_format: Literal["auto", "safetensors", "dummy"] = flag(
        "auto",
        "How vLLM first loads weights. dummy: random ones, since the first sync comes before the first rollout; saves a read.",
    )
    weight_sync_interval: int = flag(
        1,
        "Send weights to the engines after every N-th training step, and before an evaluation or a checkpoint. N > 1 makes "
        "rollouts up to N-1 steps older.",
        bounds="> 0",
    )
    sync_bucket_mb: int = flag(512, "MiB of weights gathered and sent in one call.", bounds="> 0")


@group("Sampling")
class SamplingFlags:
    temperature: float = flag(
        1.0, "Sampling temperature; training log-probs and KL use logits divided by it.", bounds="> 0"
    )
    top_p: float = flag(1.0, "Nucleus sampling: smallest token set with this probability. 1: off.", bounds="(0, 1]")
    top_k: int = flag(-1, "Sample among the k likeliest tokens. -1: off.", bounds="-1 or > 0")
    prompt_max_len: int = flag(
        1024, "Most prompt tokens; longer prompts are left out, counted and reported.", bounds="> 0"
    )
    generate_max_len: int = flag(1024, "Most new tokens after the prompt.", bounds="> 0", alias=("max_new_tokens",))
