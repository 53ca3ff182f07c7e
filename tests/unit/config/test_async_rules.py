"""Rules of --async_train and --partial_rollout, and what follows from their flags."""

import pytest

from openrl.cluster.planner import plan_placement, role_requests
from openrl.config import derived
from openrl.config.commands import PPOConfig
from tests.flags import GRPO, ppo, said, settle

IS = "--enable_vllm_is_correction"
ASYNC = f"{GRPO} --async_train {IS}"
PARTIAL = f"{GRPO} --partial_rollout {IS}"
KEEP = f"{PARTIAL} --partial_rollout_cache keep"


@pytest.mark.parametrize(
    "words",
    [
        ASYNC,
        f"{ASYNC} --async_queue_size 2 --staleness_policy mask --max_staleness 1",
        f"{ASYNC} --colocate_all_models --actor_num_gpus_per_node 4 --vllm_num_engines 2",
        f"{ASYNC} --placement actor=0-1;ref=0-1;vllm=2-3",
        f"{ASYNC} --max_staleness 0 --full_determinism",
        f"{ASYNC} --weight_sync_interval 2 --vllm_generate_batch_size 2048",
        f"{ASYNC} --partial_rollout --oversample_ratio 1.5 --lora_rank 8 --staleness_policy drop",
        PARTIAL,
        f"{PARTIAL} --colocate_all_models --vllm_enable_sleep --device cpu",
        f"{PARTIAL} --oversample_ratio 2 --dynamic_filtering",
    ],
)
def test_what_can_be(words):
    assert said(PPOConfig, words) == []


@pytest.mark.parametrize(
    ("words", "flags", "message", "fix"),
    [
        (f"{ASYNC} --placement actor=0;ref=0;vllm=0", "async_train, --placement", "cannot share GPUs with models", "actor=0-3;vllm=4-7"),
        (f"{ASYNC} --vllm_enable_sleep", "async_train, --vllm_enable_sleep", "cannot sleep", "out"),
        (f"{ASYNC} --colocate_all_models --vllm_enable_sleep", "async_train, --vllm_enable_sleep", "cannot sleep", "out"),
        (f"{ASYNC} --full_determinism", "async_train, --full_determinism", "the engines' speed decides", "--max_staleness 0"),
        (f"{PARTIAL} --full_determinism", "partial_rollout, --full_determinism", "the engines' speed decides", "leave one out"),
        (f"{PARTIAL} --max_staleness 0", "partial_rollout, --max_staleness", "its first tokens are stale", "--max_staleness 1"),
        (f"{KEEP} --rollout_backend hf", "partial_rollout_cache, --rollout_backend", "only vLLM can keep keys and values", "refill"),
        (f"{KEEP} --colocate_all_models --vllm_enable_sleep", "partial_rollout_cache, --vllm_enable_sleep", "sleep", "refill"),
        (f"{KEEP} --lora_rank 8 --lora_sync adapter", "partial_rollout_cache, --lora_sync", "adapter", "refill"),
        (f"{ASYNC} --rollout_scheduler batch", "async_train, --rollout_scheduler", "none is left over", "stream"),
        (f"{PARTIAL} --rollout_scheduler batch", "partial_rollout, --rollout_scheduler", "none is left over", "stream"),
        (f"{GRPO} --oversample_ratio 2 --rollout_scheduler batch", "oversample_ratio, --rollout_scheduler",
         "none is left over", "stream"),
        (f"{GRPO} --oversample_ratio 2 --full_determinism", "oversample_ratio, --full_determinism", "the engines' speed decides", "out"),
        (f"{PARTIAL} --oversample_ratio 2 --vllm_generate_batch_size 1500",
         "oversample_ratio, --vllm_generate_batch_size", "both set how many prompts run", "leave one out"),
        (f"{ASYNC} --oversample_ratio 0.5", "oversample_ratio", "must be >= 1", ""),
        (f"{GRPO} --eval_only", "eval_only, --eval_dataset", "nothing to evaluate", "--eval_dataset FILE"),
        (f"{ASYNC} --async_queue_size 0", "async_queue_size", "must be > 0", ""),
    ],
)  # fmt: skip
def test_what_cannot_be(words, flags, message, fix):
    config, problems = settle(PPOConfig, words)
    (problem,) = [p for p in problems if p.fatal]
    assert config is None and str(problem).startswith(f"--{flags}: ")
    assert message in problem.message and fix in problem.fix


@pytest.mark.parametrize(
    ("words", "warnings"),
    [
        (f"{GRPO} --async_train", ["async_train: rollouts are up to 1 step old"]),
        (f"{GRPO} --async_train --async_queue_size 3", ["async_train: rollouts are up to 3"]),
        (f"{GRPO} --async_train --max_staleness 0", []),
        (f"{GRPO} --partial_rollout", ["partial_rollout: rollouts are up to 1 step old"]),
        # 2 syncs, each after 2 steps, and the step before the next one
        (f"{GRPO} --async_train --max_staleness 2 --weight_sync_interval 2",
         ["async_train, --weight_sync_interval: rollouts are up to 5 steps old"]),
        (f"{PARTIAL} --partial_rollout_cache keep", ["partial_rollout_cache: the trainer cannot recompute"]),
        (f"{GRPO} --oversample_ratio 1.5", ["oversample_ratio: the slowest groups, with the longest answers, are dropped"]),
        (f"{GRPO} --vllm_generate_batch_size 2000", ["vllm_generate_batch_size: the slowest groups, with the longest answers, are dropped"]),
    ],
)  # fmt: skip
def test_warnings(words, warnings):
    config, problems = settle(PPOConfig, words)
    assert config is not None and len(problems) == len(warnings)
    for problem, warning in zip(problems, warnings, strict=True):
        assert not problem.fatal and str(problem).startswith(f"--{warning}")


def test_flags_of_asynchrony_without_it():
    (warning,) = said(
        PPOConfig,
        f"{GRPO} --async_queue_size 2 --max_staleness 2 --staleness_policy drop"
        " --partial_rollout_cache keep",
    )
    assert warning.splitlines()[1:] == [
        "  --async_queue_size acts with --async_train",
        "  --partial_rollout_cache acts with --partial_rollout",
        "  --max_staleness acts with --async_train, or with --partial_rollout",
        "  --staleness_policy acts with --async_train, or with --partial_rollout",
    ]


@pytest.mark.parametrize(
    ("words", "ahead", "running", "staleness", "goes_on"),
    [
        ("", 0, 100, 0, False),
        ("--async_train", 1, 100, 1, True),
        ("--async_train --async_queue_size 3 --max_staleness 2", 3, 100, 2, True),
        ("--async_train --max_staleness 0", 1, 100, 0, True),
        ("--partial_rollout", 0, 100, 1, True),
        ("--partial_rollout --oversample_ratio 1.255", 0, 126, 1, True),
        ("--partial_rollout --async_train --vllm_generate_batch_size 150", 1, 150, 1, True),
        ("--oversample_ratio 2", 0, 200, 0, False),
        ("--vllm_generate_batch_size 40 --dynamic_filtering", 0, 40, 0, False),
    ],
)
def test_what_follows(words, ahead, running, staleness, goes_on):
    batches = "--rollout_batch_size 100 --train_batch_size 100 --micro_train_batch_size 4"
    config, _ = settle(PPOConfig, f"{GRPO} {batches} {words}")
    assert config.asynchrony.steps_ahead == ahead
    assert derived.prompts_running(config) == running
    assert config.asynchrony.staleness_bound == staleness
    assert config.asynchrony.carries_over == goes_on


def test_all_models_share_places_and_engines_of_async_training_have_their_own():
    words = f"{ASYNC} --colocate_all_models --device cpu --actor_num_gpus_per_node 2 --vllm_num_engines 2"
    config = ppo(f"{words} --train_batch_size 128")
    requests = role_requests(
        config.placement, config.hybrid, config.engine, ["actor", "reference"], True
    )
    rows = plan_placement(requests, "cpu", []).rows
    assert rows == {"actor": (0, 1), "reference": (0, 1), "vllm": (2, 3)}
