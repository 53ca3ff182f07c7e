"""Rules of the rollout engine, and of rollouts that are written to files or read from them."""

from __future__ import annotations

from pathlib import Path

from openrl.config.commands import AnsweringConfig, PPOConfig
from openrl.config.derived import longest_sequence
from openrl.config.rules.machine import output_problems
from openrl.flags.checks import Problem, Problems, check, check_environment
from openrl.flags.schema import collect_flags
from openrl.flags.values import secrets_in

OWN_FLAGS = {
    "model": "pretrain",
    "tokenizer": "tokenizer_path",
    "hf_overrides": "model_config_overrides",
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
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "pipeline_parallel_size": "vllm_pipeline_parallel_size",
    "data_parallel_size": "vllm_data_parallel_size",
    "enable_expert_parallel": "vllm_enable_expert_parallel",
}
"""Field of vLLM's EngineArgs -> the flag that sets it."""

MOST_SERVED_RANK = 512
"""The largest adapter rank that vLLM can serve."""

RESERVED = (
    "logprobs_mode",
    "worker_extension_cls",
    "distributed_executor_backend",
    "weight_transfer_config",
    "enable_sleep_mode",
    "enable_lora",
    "max_lora_rank",
    "max_loras",
    "max_cpu_loras",
)
"""Fields that training, weight sync and placement depend on."""


@check
def engine_kwargs_are_further_ones(
    config: PPOConfig | AnsweringConfig,
) -> Problems:
    flags = {spec.name for spec in collect_flags(type(config))}
    for name, value in config.engine.vllm_engine_kwargs.items():
        if (flag := OWN_FLAGS.get(name)) in flags:
            yield Problem(
                ("vllm_engine_kwargs", flag), f"{name} has its own flag", f"--{flag} {value}"
            )
        elif name in RESERVED:
            yield Problem(
                ("vllm_engine_kwargs",), f"training and placement depend on {name}", "leave it out"
            )


@check
def experts_have_several_places(config: PPOConfig) -> Problems:
    if config.engine.vllm_enable_expert_parallel and config.engine.sizes.width == 1:
        message = "an engine with one GPU cannot split experts"
        yield Problem(
            ("vllm_enable_expert_parallel",),
            message,
            "--vllm_tensor_parallel_size 2, or leave it out",
        )


@check
def rollouts_are_filled(config: PPOConfig) -> Problems:
    running, wanted = config.collecting.vllm_generate_batch_size, config.batch.rollout_batch_size
    name = "vllm_generate_batch_size"
    if running is not None and running < wanted and not config.filtering.dynamic_filtering:
        message = (
            f"{running} prompts do not fill a rollout of {wanted}, and without"
            " --dynamic_filtering there is only one round"
        )
        yield Problem(
            (name, "rollout_batch_size"),
            message,
            f"--dynamic_filtering, or --{name} {wanted} or more",
        )


@check
def environment_is_readable(config: PPOConfig) -> Problems:
    for pair in config.placement.system_envs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            yield Problem(
                ("system_envs",),
                f"{name!r} is not of the form NAME=VALUE",
                "--system_envs NCCL_DEBUG=WARN",
            )
        elif secret := next(secrets_in({name: value}), None):
            message = (
                f"{secret} looks like a secret, but flags are written to config.yaml and trackers"
            )
            yield Problem(
                ("system_envs",), message, f"export {name} where this command, or `ray start`, runs"
            )


@check
def blocks_are_of_a_size_that_kernels_know(config: PPOConfig) -> Problems:
    size, unit = config.engine.vllm_block_size, 32 if config.device.device == "cpu" else 16
    if config.engine.rollout_backend == "vllm" and size is not None and size % unit:
        message = f"a block of {size} tokens is not a multiple of {unit}"
        fix = f"--vllm_block_size {max(unit, size - size % unit)}"
        yield Problem(("vllm_block_size",), message, fix)


@check
def a_step_has_a_token_of_each_sequence(config: PPOConfig) -> Problems:
    tokens, sequences = config.engine.vllm_max_num_batched_tokens, config.engine.vllm_max_num_seqs
    if config.engine.rollout_backend == "vllm" and tokens and sequences and tokens < sequences:
        message = f"{sequences} sequences at a time need {sequences} tokens per step, not {tokens}"
        names = ("vllm_max_num_batched_tokens", "vllm_max_num_seqs")
        yield Problem(names, message, f"--vllm_max_num_batched_tokens {sequences}")


@check
def samples_fit_the_engine(config: PPOConfig) -> Problems:
    yield from samples_fit(config.engine.vllm_max_model_len, longest_sequence(config))


def samples_fit(limit: int | None, longest: int) -> Problems:
    if limit is not None and limit < longest:
        yield Problem(
            ("vllm_max_model_len", "prompt_max_len", "generate_max_len"),
            f"prompt and response may have {longest} tokens together, but the engine accepts only"
            f" {limit}",
            f"--vllm_max_model_len {longest}",
        )


@check
def engine_and_trainer_compute_alike(config: PPOConfig) -> Problems:
    engine, ours = config.engine, config.model.param_dtype
    if engine.rollout_backend == "hf":
        return
    if engine.vllm_quantization and config.device.device == "cpu":
        yield Problem(
            ("vllm_quantization", "device"),
            f"{engine.vllm_quantization} needs a GPU",
            "leave it out",
        )
    if engine.vllm_dtype == "fp16" and ours == "bf16":
        message = "bf16 values can exceed 65504, where fp16 overflows to infinity"
        yield Problem(
            ("vllm_dtype", "param_dtype"), message, "--vllm_dtype auto, or --param_dtype fp16"
        )
        return
    coarse = engine.vllm_quantization or (
        engine.vllm_dtype if engine.vllm_dtype not in ("auto", ours) else None
    )
    if coarse and not config.correction.enable_vllm_is_correction:
        flag = "vllm_quantization" if engine.vllm_quantization else "vllm_dtype"
        yield Problem(
            (flag,),
            f"the engine samples in {coarse} but the trainer computes in {ours}, so their"
            " log-probs drift apart",
            "--enable_vllm_is_correction",
            fatal=False,
        )


@check
def weights_have_a_way(config: PPOConfig) -> Problems:
    if config.engine.vllm_sync_backend == "nccl" and config.device.device == "cpu":
        yield Problem(
            ("vllm_sync_backend", "device"), "NCCL needs GPUs", "--vllm_sync_backend gloo"
        )


@check
def adapters_are_served(config: PPOConfig) -> Problems:
    """--lora_sync adapter needs an engine with the same base and with room for the adapter beside
    it."""
    if config.lora.lora_sync == "merge" or not config.lora.adapts:
        return
    merge = "--lora_sync merge"
    if config.engine.rollout_backend == "hf":
        yield Problem(
            ("lora_sync", "rollout_backend"),
            "the hf backend can generate only with merged weights",
            merge,
        )
    if config.lora.load_in_4bit:
        yield Problem(
            ("lora_sync", "load_in_4bit"),
            "the engine would hold a different base, without 4-bit weights",
            merge,
        )
    if config.engine.vllm_load_format == "dummy":
        yield Problem(
            ("lora_sync", "vllm_load_format"),
            "a sync sends only the adapter, so the engine must read the base",
            "leave it out",
        )
    if config.lora.rank > MOST_SERVED_RANK:
        yield Problem(
            ("lora_sync", "lora_rank"), f"vLLM serves adapters up to rank {MOST_SERVED_RANK}", merge
        )


# -- replay ----------------------------------------------------------------------------------------


@check
def nothing_is_played_where_rollouts_are_replayed(config: PPOConfig) -> Problems:
    if not config.collecting.replays:
        return
    evaluation = config.evaluation
    asked = {
        "rollout_dump_dir": config.collecting.rollout_dump_dir is not None,
        "async_train": config.asynchrony.async_train,
        "partial_rollout": config.asynchrony.partial_rollout,
        "eval_steps": evaluation.eval_steps > 0,
        "eval_before_train": evaluation.eval_before_train,
        "eval_only": evaluation.eval_only,
    }
    for flag in [name for name, on in asked.items() if on]:
        message = "answers come from files, so no engine runs"
        yield Problem(("rollout_replay_dir", flag), message, f"leave --{flag} out")


@check_environment
def kept_rollouts_are_there(config: PPOConfig) -> Problems:
    directory = config.collecting.rollout_replay_dir
    if directory is not None and not Path(directory).expanduser().is_dir():
        fix = "a directory that another run wrote with --rollout_dump_dir"
        yield Problem(("rollout_replay_dir",), f"no such directory: {directory}", fix)


@check_environment
def rollouts_of_two_runs_are_kept_apart(config: PPOConfig) -> Problems:
    directory, flags = config.collecting.rollout_dump_dir, config.checkpoint
    yield from output_problems("rollout_dump_dir", directory)
    if directory and not flags.resumes and any(Path(directory).expanduser().glob("step_*.jsonl")):
        message = f"{directory} holds rollouts of an earlier run"
        yield Problem(("rollout_dump_dir",), message, "another directory")
