"""Flags of drawing: which lengths they mean together, what is refused, and what engines are asked
for."""

import pytest

from openrl.config import derived
from openrl.config.commands import PPOConfig
from openrl.config.groups.sampling import Lengths, SamplingFlags
from openrl.rollout_engines.engine import room_for
from openrl.trainer.launch import evaluation_sampling, training_sampling
from openrl.types import Sampling
from tests.flags import PPO, ppo, said, settle


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (1024, 1024, 2048)),
        ({"prompt_max_len": 10}, (10, 1024, 1034)),
        ({"max_len": 100}, (50, 99, 100)),
        ({"max_len": 100, "generate_max_len": 30}, (70, 30, 100)),
        ({"max_len": 100, "prompt_max_len": 30}, (30, 99, 100)),
        ({"max_len": 100, "prompt_max_len": 80, "generate_max_len": 80}, (80, 80, 100)),
        ({"max_len": 100, "prompt_max_len": 20, "generate_max_len": 30}, (20, 30, 50)),
    ],
)
def test_lengths(flags, expected):
    assert SamplingFlags(**flags).lengths == Lengths(*expected)


def test_a_response_gets_what_its_prompt_leaves():
    sampling = Sampling(80, max_len=100)
    assert [room_for([1] * n, sampling, 4096) for n in (10, 20, 30, 99)] == [80, 80, 70, 1]
    assert room_for([1] * 30, sampling, 64) == 34


def test_what_engines_are_asked_for():
    draw = (
        "--temperature 0.9 --top_p 0.8 --top_k 7 --min_p 0.1 --repetition_penalty 1.2 --stop END"
        " STOP --ignore_eos"
    )
    config, _ = settle(PPOConfig, f"{PPO} {draw} --max_len 64 --generate_max_len 32")
    assert training_sampling(config) == Sampling(
        32, 0.9, 0.8, 7, 0.1, 1.2, ("END", "STOP"), True, max_len=64
    )
    asked = "--eval_dataset e --eval_steps 1 --eval_temperature 0.5 --eval_top_p 0.7 --eval_top_k 3"
    config = ppo(f"{PPO} --stop END --max_len 64 {asked}")
    assert evaluation_sampling(config) == Sampling(63, 0.5, 0.7, 3, stop=("END",), max_len=64)
    config = ppo(
        f"{PPO} --prompt_max_len 10 --generate_max_len 20 {asked} --eval_generate_max_len 50"
    )
    assert evaluation_sampling(config) == Sampling(50, 0.5, 0.7, 3)
    assert derived.longest_sequence(config) == 60


@pytest.mark.parametrize(
    ("words", "flags", "message"),
    [
        ("--max_len 64 --generate_max_len 64", "generate_max_len, --max_len", "leave no room"),
        ("--max_len 64 --prompt_max_len 70", "prompt_max_len, --max_len", "leave no room"),
        ("--vllm_generate_batch_size 64", "vllm_generate_batch_size, --rollout_batch_size", "do not fill a rollout"),
        ("--vllm_generate_batch_size 2048 --rollout_scheduler batch", "vllm_generate_batch_size, --rollout_scheduler",
         "none is left over"),
        ("--vllm_generate_batch_size 2048 --full_determinism", "vllm_generate_batch_size, --full_determinism", "the engines' speed decides"),
        ("--system_envs NCCL_DEBUG", "system_envs", "'NCCL_DEBUG' is not of the form NAME=VALUE"),
        ("--system_envs HF_TOKEN=abc", "system_envs", "looks like a secret"),
        ("--system_envs DB_PASSWD=abc", "system_envs", "DB_PASSWD looks like a secret"),
        ("--system_envs accessToken=abc", "system_envs", "accessToken looks like a secret"),
        ("--system_envs HTTPS_PROXY=http://me:abc@host:1", "system_envs", "a URL's password looks like a secret"),
        ("--system_envs HOOK=https://host/x?sig=abc", "system_envs", "sig looks like a secret"),
    ],
)  # fmt: skip
def test_refused(words, flags, message):
    (problem,) = said(PPOConfig, f"{PPO} {words}")
    assert problem.startswith(f"--{flags}: ") and message in problem and "abc" not in problem


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--min_p 0.1 --top_k 4", "ratios are biased"),
        ("--repetition_penalty 1.1", "not the one that is sampled"),
        ("--ignore_eos", "meaningless text"),
        (
            "--vllm_generate_batch_size 2048",
            "the slowest groups, with the longest answers, are dropped",
        ),
    ],
)
def test_warned_of(words, message):
    (problem,) = settle(PPOConfig, f"{PPO} {words}")[1]
    assert not problem.fatal and message in str(problem)


@pytest.mark.parametrize("words", ["--min_p 0.1", "--repetition_penalty 1.1"])
def test_a_moved_distribution_is_no_weight(words):
    fatal = [
        p for p in settle(PPOConfig, f"{PPO} {words} --enable_vllm_is_correction")[1] if p.fatal
    ]
    assert "not an importance weight" in str(fatal[0])


def test_variables_of_the_run():
    placement = ppo(f"{PPO} --system_envs NCCL_DEBUG=WARN NCCL_IB_HCA=mlx5_0=1").placement
    assert placement.environment == {
        "NCCL_DEBUG": "WARN",
        "NCCL_IB_HCA": "mlx5_0=1",
    }
