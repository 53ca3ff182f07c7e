"""Flags of drawing: which lengths they mean together, what is refused, and what engines are asked
for."""

import json

import pytest

from openrl.config.commands import PPOConfig
from openrl.config.groups.sampling import Lengths, SamplingFlags
from openrl.config.lengths import fitting_lengths, length_flags, longest_judged, longest_sequence
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
        32, 0.9, 0.8, 7, 0.1, 1.2, ("END", "STOP"), True, max_len=64, kept_ids=512
    )
    config, _ = settle(PPOConfig, f"{PPO} --repetition_penalty 1.2")
    assert not training_sampling(config).lists
    config, _ = settle(PPOConfig, f"{PPO} --policy_loss_type score_centering")
    assert training_sampling(config).likeliest == 32
    asked = "--eval_dataset e --eval_steps 1 --eval_temperature 0.5 --eval_top_p 0.7 --eval_top_k 3"
    config = ppo(f"{PPO} --stop END --max_len 64 {asked}")
    assert evaluation_sampling(config) == Sampling(63, 0.5, 0.7, 3, stop=("END",), max_len=64)
    config = ppo(
        f"{PPO} --prompt_max_len 10 --generate_max_len 20 {asked} --eval_generate_max_len 50"
    )
    assert evaluation_sampling(config) == Sampling(50, 0.5, 0.7, 3)
    assert longest_sequence(config) == 60


@pytest.mark.parametrize(
    ("judge", "asked", "tokens"),
    [
        ("judge", {}, 256 + 10 + 2 * 20 + 1024),  # a question, a label, an answer and the reply
        ("judge", {"max_tokens": 30}, 256 + 10 + 2 * 20 + 30),
        ("judge_ranking", {"max_tokens": 30}, 256 + 10 + 5 * 20 + 30),  # four siblings
        ("judge", {"max_tokens": "30 or so"}, 256 + 10 + 2 * 20),  # which its options refuse
    ],
)
def test_what_engines_are_asked_as_judges(judge, asked, tokens):
    kwargs = json.dumps({"url": "engines", "model": "policy"} | asked)
    lengths = "--prompt_max_len 10 --generate_max_len 20 --apply_chat_template"
    source = f"--reward_funcs {judge} --n_samples_per_prompt 4 --reward_func_kwargs"
    flags = [*f"{PPO} {lengths} {source}".split(), kwargs]
    assert longest_judged(ppo(flags)) == tokens


def test_variables_of_the_run():
    placement = ppo(f"{PPO} --system_envs NCCL_DEBUG=WARN NCCL_IB_HCA=mlx5_0=1").placement
    assert placement.environment == {
        "NCCL_DEBUG": "WARN",
        "NCCL_IB_HCA": "mlx5_0=1",
    }


def test_a_top_k_beyond_the_sets_that_are_known_trains_nothing():
    (message,) = said(PPOConfig, f"{PPO} --top_k 1000")
    assert "every token is drawn from 1000, and none that is drawn from more than 512" in message
    assert "--kept_ids_max 1000" in message
    assert not said(PPOConfig, f"{PPO} --top_k 1000 --kept_ids_max 1000")
    assert not said(PPOConfig, f"{PPO} --top_k 1000 --top_p 0.9")  # which may leave fewer


@pytest.mark.parametrize(
    ("words", "most", "decide", "remedy"),
    [
        ("--prompt_max_len 600 --generate_max_len 16", 1024, "generate_max_len", ""),
        ("--prompt_max_len 600 --generate_max_len 16", 610, "generate_max_len", "--max_len 610"),
        (
            "--prompt_max_len 600 --generate_max_len 16",
            512,
            "generate_max_len",
            "--max_len 512 --prompt_max_len 496",
        ),
        (
            "--prompt_max_len 600 --generate_max_len 700",
            512,
            "generate_max_len",
            "--max_len 512 --prompt_max_len 256 --generate_max_len 256",
        ),
        (
            "--prompt_max_len 600 --generate_max_len 16 --eval_generate_max_len 4096",
            1024,
            "eval_generate_max_len",
            "--eval_generate_max_len 424",
        ),
        (
            "--generate_max_len 900 --eval_generate_max_len 4096",
            1000,
            "eval_generate_max_len",
            "--max_len 1000 --eval_generate_max_len 900",
        ),
        ("--max_len 2000", 512, "max_len", "--max_len 512"),
    ],
)
def test_the_lengths_to_try_fit_and_pass_every_rule(words, most, decide, remedy):
    given = PPO + " --eval_dataset e --eval_steps 10 " + words
    config = ppo(given)
    assert length_flags(config)[-1] == decide
    assert fitting_lengths(config, most) == remedy
    assert longest_sequence(ppo(f"{given} {remedy}")) <= most
