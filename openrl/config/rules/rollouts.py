"""Rules of rollouts: how engines sample them, and which of them are trained on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from openrl.config.commands import AnsweringConfig, PPOConfig
from openrl.config.conditions import VLLM
from openrl.config.derived import (
    learns_without_rewards,
)
from openrl.config.groups.rollout_correction import rejection_tests
from openrl.config.lengths import length_flags, longest_sequence
from openrl.errors import counted
from openrl.flags.checks import Given, Problems, check, check_environment, in_use, problem, warning
from openrl.flags.schema import collect_flags
from openrl.flags.values import convert

# -- correction, rejection, filtering --------------------------------------------------------------


@check
def rejection_tests_are_sound(config: PPOConfig) -> None:
    rejection_tests(config.correction)


@check
def icepop_is_one_type(config: PPOConfig, given: Given) -> Problems:
    flags = config.correction
    other = flags.vllm_is_correction_type
    if flags.use_icepop and "vllm_is_correction_type" in given and other != "icepop":
        message = f"two types of correction: icepop and {other}"
        yield problem(("use_icepop", "vllm_is_correction_type"), message, "leave one out")


@check
def log_probs_can_be_compared(config: PPOConfig) -> Problems:
    """Corrections and tests compare the engine's log-probs with the trainer's."""
    flags = config.correction
    replaced = flags.skip_old_logprob == "always"
    users = in_use(config, "enable_vllm_is_correction", "rollout_rs")
    if users and replaced:
        message = "both would be the engine's log-probs, so every ratio between them would be 1"
        yield problem(("skip_old_logprob", *users), message, "--skip_old_logprob auto")
    users += ("skip_old_logprob",) if replaced else ()
    if config.sampling.repetition_penalty != 1 and users:
        message = "the engine's log-probs have the penalty: the ratio is no importance weight"
        yield problem((*users, "repetition_penalty"), message, "leave --repetition_penalty out")


@check
def filtering_has_groups_and_rewards(config: PPOConfig, given: Given) -> Problems:
    if not config.filtering.dynamic_filtering:
        return
    if config.batch.n_samples_per_prompt == 1:
        message = "the mean score of a single answer is never between right and wrong"
        names = ("dynamic_filtering", "n_samples_per_prompt")
        yield problem(names, message, "--n_samples_per_prompt 8")
    if config.others.reward_pretrain is not None and "dynamic_filtering_reward_range" not in given:
        flags = ("dynamic_filtering_reward_range", "reward_pretrain")
        message = "a reward model gives no verdicts: groups with a mean reward in (0, 1) are kept"
        fix = "--dynamic_filtering_reward_range with bounds on the model's scale"
        yield warning(flags, message, fix)


# -- the engine ------------------------------------------------------------------------------------


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
    "max_logprobs",
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
def speculation_leaves_log_probs_right(config: PPOConfig) -> Problems:
    """What vLLM 0.32 does with ``speculative_config``."""
    if "speculative_config" not in config.engine.vllm_engine_kwargs or not VLLM.holds(config):
        return
    flags = ("vllm_engine_kwargs",)
    leave = "leave speculative_config out"
    if config.device.device == "cpu":
        message = "with speculative_config vLLM's log-probs are wrong on a CPU"
        yield problem((*flags, "device"), message, leave)
    if config.sampling.min_p:
        message = "with speculative_config vLLM refuses requests with min_p"
        yield problem((*flags, "min_p"), message, f"{leave}, or --top_p instead of --min_p")


@check
def rollouts_are_filled(config: PPOConfig) -> Problems:
    running, wanted = config.collecting.vllm_generate_batch_size, config.batch.rollout_batch_size
    name = "vllm_generate_batch_size"
    if running is not None and running < wanted and not config.filtering.dynamic_filtering:
        message = f"{counted(running, 'prompt')} cannot fill a rollout of {wanted} in one round"
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
        flags = ("vllm_max_model_len", *length_flags(config))
        message = (
            f"prompt and response may have {longest} tokens together, but the engine accepts only"
            f" {limit}"
        )
        yield problem(flags, message, f"--vllm_max_model_len {longest}")


@check
def engine_and_trainer_compute_alike(config: PPOConfig) -> Problems:
    engine, trained = config.engine, config.model.param_dtype
    if engine.rollout_backend == "hf":
        return
    if engine.vllm_dtype == "fp16" and trained == "bf16":
        message = "bf16 values can exceed 65504, where fp16 overflows to infinity"
        fix = "--vllm_dtype auto, or --param_dtype fp16"
        yield problem(("vllm_dtype", "param_dtype"), message, fix)
        return
    flag = "vllm_quantization" if engine.vllm_quantization else "vllm_dtype"
    sampled = getattr(engine, flag)
    if sampled not in ("auto", trained) and not config.correction.enable_vllm_is_correction:
        message = (
            f"the engine samples in {sampled}, the trainer in {trained}: log-probs drift apart"
        )
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
def replayed_groups_can_be_learnt_from(config: PPOConfig) -> Problems:
    flags, correction = config.replay, config.correction
    if not flags.replay_groups:
        return
    if "values" in config.algorithm.estimator.needs:
        message = "a critic would learn the returns of policies that no longer play"
        fix = "--advantage_estimator group_norm"
        yield problem(("replay_groups", "advantage_estimator"), message, fix)
    elif config.batch.n_samples_per_prompt == 1:
        message = "groups are replayed whose rewards differ, but each prompt gets one answer"
        fix = "--n_samples_per_prompt 8"
        yield problem(("replay_groups", "n_samples_per_prompt"), message, fix)
    if "running" in config.reward_norm_scopes:
        message = "replayed rewards would count again in the moments over the run"
        flags_of_norm = ("replay_groups", "reward_norm_mean", "reward_norm_std")
        yield problem(flags_of_norm, message, "the scope batch or group")
    if config.routing.routing_replay:
        message = "the experts of groups that wait are too many numbers for memory and checkpoints"
        yield problem(("replay_groups", "routing_replay"), message, "leave one out")
    if learns_without_rewards(config):
        message = "nothing gives rewards, so no group has any that differ"
        yield problem(("replay_groups",), message, "leave it out, or add a reward")
    if not correction.enable_vllm_is_correction and correction.skip_old_logprob != "always":
        message = "older policies sampled the replayed answers, and no ratio corrects for that"
        yield problem(("replay_groups",), message, "--enable_vllm_is_correction")
    too_old = config.asynchrony.staleness_bound < flags.replay_max_age
    if config.asynchrony.staleness_policy == "mask" and too_old:
        message = "tokens that may be replayed are masked for their age"
        fix = f"--max_staleness {flags.replay_max_age}, or --staleness_policy drop"
        yield problem(("replay_max_age", "staleness_policy", "max_staleness"), message, fix)
    if flags.buffer_size < flags.replay_groups:
        message = f"a step cannot replay {flags.replay_groups} of {flags.buffer_size} groups"
        fix = f"--replay_buffer_size {flags.replay_groups}"
        yield problem(("replay_buffer_size", "replay_groups"), message, fix)


@check
def nothing_is_played_where_rollouts_are_replayed(config: PPOConfig) -> Problems:
    if not config.collecting.replays:
        return
    flags = in_use(
        config,
        "rollout_dump_dir",
        "async_train",
        "partial_rollout",
        "eval_before_train",
        "eval_only",
    )
    for flag in (*flags, *(("eval_steps",) if config.evaluation.eval_steps > 0 else ())):
        message = "answers come from files, so no engine runs"
        yield problem(("rollout_replay_dir", flag), message, f"leave --{flag} out")


@check_environment
def kept_rollouts_are_there(config: PPOConfig) -> Problems:
    directory = config.collecting.rollout_replay_dir
    if directory is not None and not Path(directory).expanduser().is_dir():
        fix = "the --save_path of a run with --trace_sample_rate 1, or its --rollout_dump_dir"
        yield problem(("rollout_replay_dir",), f"no such directory: {directory}", fix)


@check_environment
def rollouts_of_two_runs_are_kept_apart(config: PPOConfig) -> Problems:
    directory, flags = config.collecting.rollout_dump_dir, config.checkpoint
    if directory and not flags.resumes and (Path(directory).expanduser() / "index.jsonl").exists():
        message = f"{directory} holds rollouts of an earlier run"
        yield problem(("rollout_dump_dir",), message, "another directory")
    if (read := config.collecting.rollout_replay_dir) is not None:
        run, read_from = Path(flags.save_path).expanduser().resolve(), Path(read).expanduser()
        if read_from.resolve() in (run, run / "trace"):
            message = "this run would write its trace over the one that it replays"
            yield problem(("rollout_replay_dir", "save_path"), message, "another --save_path")


# -- how answers are drawn -------------------------------------------------------------------------


@check
def kept_sets_are_known_whole(config: PPOConfig) -> Problems:
    sampling = config.sampling
    if sampling.cuts == ("top_k",) and sampling.top_k > sampling.kept_ids_max:
        message = (
            f"every token is drawn from {sampling.top_k}, and none that is drawn from more than"
            f" {sampling.kept_ids_max} is trained"
        )
        fix = f"--kept_ids_max {sampling.top_k}, or a smaller --top_k"
        yield problem(("top_k", "kept_ids_max"), message, fix)


@check
def sampled_distribution_is_the_trained_one(config: PPOConfig) -> Problems:
    if config.sampling.repetition_penalty != 1:
        message = "the trained policy, without a penalty, is not the one that is sampled"
        fix = "leave it out, or use a reward that punishes repeats"
        yield warning(("repetition_penalty",), message, fix)
    if config.sampling.ignore_eos:
        message = "answers continue past their end, so rewards and losses see meaningless text"
        fix = "leave it out, except to measure speed"
        yield warning(("ignore_eos",), message, fix)


@check
def chosen_experts_come_with_the_tokens(config: PPOConfig) -> Problems:
    if not config.routing.routing_replay:
        return
    if config.collecting.replays:
        message = "kept rollouts hold no experts: they are too many numbers for the trace"
        yield problem(("routing_replay", "rollout_replay_dir"), message, "leave one out")
    elif VLLM.holds(config) and config.debug.full_determinism:
        message = "vLLM returns experts only with cached prefixes, which are off for equal bits"
        yield problem(("routing_replay", "full_determinism"), message, "--rollout_backend hf")
    flags = config.asynchrony
    if VLLM.holds(config) and flags.partial_rollout and flags.partial_rollout_cache != "keep":
        message = "an answer that an update interrupts loses the experts of the tokens before it"
        names = ("routing_replay", "partial_rollout")
        yield warning(names, message, "leave --partial_rollout out")


@check
def stop_texts_are_texts(config: PPOConfig | AnsweringConfig) -> Problems:
    if "" in config.sampling.stop:
        yield problem(("stop",), "an empty text would end every answer at once", "leave it out")


@check
def lengths_add_up(config: PPOConfig) -> Problems:
    sampling = config.sampling
    for name in ("prompt_max_len", "generate_max_len"):
        part = getattr(sampling, name)
        if sampling.max_len is not None and part is not None and part >= sampling.max_len:
            message = f"{part} of {sampling.max_len} tokens leave no room for the other part"
            fix = f"--{name} {sampling.max_len - 1} or less, or --max_len {part + 1} or more"
            yield problem((name, "max_len"), message, fix)
