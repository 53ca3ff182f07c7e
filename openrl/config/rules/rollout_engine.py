"""Rules of the rollout engine, and of rollouts that are written to files or read from them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from openrl.config.commands import AnsweringConfig, PPOConfig
from openrl.config.conditions import VLLM
from openrl.config.derived import longest_sequence
from openrl.flags.checks import Problems, check, check_environment, in_use, problem, warning
from openrl.flags.schema import collect_flags
from openrl.flags.values import convert

OTHER_NAMES = {
    "model": "pretrain",
    "tokenizer": "tokenizer_path",
    "hf_overrides": "model_config_overrides",
    "limit_mm_per_prompt": "max_images_per_prompt",
}
"""Field of vLLM's EngineArgs -> the flag that sets it, if the flag is not called like the field or
vllm_ and the field."""

MOST_SERVED_RANK = 512
"""The largest adapter rank that vLLM can serve."""

TOKENS_OF_A_STEP = 2048
"""The most tokens of a step that vLLM takes by itself."""

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
    "runner",
    "convert",
    "skip_tokenizer_init",
    "tokens_only",
    "device_ids",
    "nnodes",
    "node_rank",
    "data_parallel_rank",
)
"""Fields that training, weight sync and placement depend on."""


@check
def engine_kwargs_are_further_ones(config: PPOConfig | AnsweringConfig) -> Problems:
    specs = {spec.name: spec for spec in collect_flags(type(config))}
    for name, value in config.engine.vllm_engine_kwargs.items():
        for flag in specs.keys() & {OTHER_NAMES.get(name, name), f"vllm_{name}"}:
            message, fix = f"{name} has its own flag", f"--{flag}"
            with suppress(ValueError):  # what vLLM calls bfloat16 is bf16 here
                convert(str(value), specs[flag].type)
                fix = f"--{flag} {value}"
            yield problem(("vllm_engine_kwargs", flag), message, fix)
        if name in RESERVED:
            message = f"training and placement depend on {name}"
            yield problem(("vllm_engine_kwargs",), message, "leave it out")


@check
def rollouts_are_filled(config: PPOConfig) -> Problems:
    running, wanted = config.collecting.vllm_generate_batch_size, config.batch.rollout_batch_size
    name = "vllm_generate_batch_size"
    if running is not None and running < wanted and not config.filtering.dynamic_filtering:
        message = f"{running} prompts do not fill a rollout of {wanted} in one round"
        fix = f"--dynamic_filtering for more rounds, or --{name} {wanted} or more"
        yield problem((name, "rollout_batch_size"), message, fix)


@check
def a_step_has_a_token_of_each_sequence(config: PPOConfig | AnsweringConfig) -> Problems:
    sequences = config.engine.vllm_max_num_seqs or 0
    tokens = config.engine.vllm_max_num_batched_tokens or TOKENS_OF_A_STEP
    if VLLM.holds(config) and tokens < sequences and not config.debug.full_determinism:
        message = f"{sequences} sequences at a time need {sequences} tokens per step, not {tokens}"
        names = ("vllm_max_num_batched_tokens", "vllm_max_num_seqs")
        yield problem(names, message, f"--vllm_max_num_batched_tokens {sequences}")


@check
def samples_fit_the_engine(config: PPOConfig | AnsweringConfig) -> Problems:
    limit, longest = config.engine.vllm_max_model_len, longest_sequence(config)
    if limit is not None and limit < longest:
        flags = ("vllm_max_model_len", "prompt_max_len", "generate_max_len")
        message = (
            f"prompt and response may have {longest} tokens together, but the engine accepts only"
            f" {limit}"
        )
        yield problem(flags, message, f"--vllm_max_model_len {longest}")


@check
def engine_and_trainer_compute_alike(config: PPOConfig) -> Problems:
    engine, ours = config.engine, config.model.param_dtype
    if engine.rollout_backend == "hf":
        return
    if engine.vllm_dtype == "fp16" and ours == "bf16":
        message = "bf16 values can exceed 65504, where fp16 overflows to infinity"
        fix = "--vllm_dtype auto, or --param_dtype fp16"
        yield problem(("vllm_dtype", "param_dtype"), message, fix)
        return
    flag = "vllm_quantization" if engine.vllm_quantization else "vllm_dtype"
    theirs = getattr(engine, flag)
    if theirs not in ("auto", ours) and not config.correction.enable_vllm_is_correction:
        message = f"the engine samples in {theirs}, the trainer in {ours}: log-probs drift apart"
        yield warning((flag,), message, "--enable_vllm_is_correction")


@check
def weights_have_a_way(config: PPOConfig) -> Problems:
    if config.engine.vllm_sync_backend == "nccl" and config.device.device == "cpu":
        message = "NCCL needs GPUs"
        yield problem(("vllm_sync_backend", "device"), message, "--vllm_sync_backend gloo")


@check
def adapters_are_served(config: PPOConfig) -> Problems:
    """--lora_sync adapter needs an engine with the same base and with room for the adapter."""
    if config.lora.lora_sync == "merge" or not config.lora.adapts:
        return
    merge = "--lora_sync merge"
    if config.engine.rollout_backend == "hf":
        message = "the hf backend can generate only with merged weights"
        yield problem(("lora_sync", "rollout_backend"), message, merge)
    if config.lora.load_in_4bit:
        message = "the engine would hold a different base, without 4-bit weights"
        yield problem(("lora_sync", "load_in_4bit"), message, merge)
    if config.engine.vllm_load_format == "dummy":
        message = "a sync sends only the adapter, so the engine must read the base"
        yield problem(("lora_sync", "vllm_load_format"), message, "leave it out")
    if config.lora.rank > MOST_SERVED_RANK:
        message = f"vLLM serves adapters up to rank {MOST_SERVED_RANK}"
        yield problem(("lora_sync", "lora_rank"), message, merge)


# -- replay ----------------------------------------------------------------------------------------


@check
def nothing_is_played_where_rollouts_are_replayed(config: PPOConfig) -> Problems:
    if not config.collecting.replays:
        return
    asked = in_use(
        config,
        "rollout_dump_dir",
        "async_train",
        "partial_rollout",
        "eval_before_train",
        "eval_only",
    )
    for flag in (*asked, *(("eval_steps",) if config.evaluation.eval_steps > 0 else ())):
        message = "answers come from files, so no engine runs"
        yield problem(("rollout_replay_dir", flag), message, f"leave --{flag} out")


@check_environment
def kept_rollouts_are_there(config: PPOConfig) -> Problems:
    directory = config.collecting.rollout_replay_dir
    if directory is not None and not Path(directory).expanduser().is_dir():
        fix = "a directory that another run wrote with --rollout_dump_dir"
        yield problem(("rollout_replay_dir",), f"no such directory: {directory}", fix)


@check_environment
def rollouts_of_two_runs_are_kept_apart(config: PPOConfig) -> Problems:
    directory, flags = config.collecting.rollout_dump_dir, config.checkpoint
    if directory and not flags.resumes and any(Path(directory).expanduser().glob("step_*.jsonl")):
        message = f"{directory} holds rollouts of an earlier run"
        yield problem(("rollout_dump_dir",), message, "another directory")
