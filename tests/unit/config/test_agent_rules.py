"""What flags of agents and environments are refused, before anything starts."""

import socket

import pytest

from openrl.config.commands import PPOConfig
from tests.flags import GRPO, said

GAMES = (
    "--pretrain m --advantage_estimator group_norm --n_samples_per_prompt 8 --max_steps 2"
    " --env_tags sokoban bandit"
)


def test_sound_flags_have_no_problems():
    assert said(PPOConfig, GAMES) == []
    assert said(PPOConfig, f"{GAMES} --env_groups 128 --env_groups_per_tag 100 28") == []


@pytest.mark.parametrize(
    ("extra", "problem", "fix"),
    [
        ("--env_groups_per_tag 1 2 --env_groups 4", "1 + 2 is not 4", "--env_groups 3"),
        ("--env_groups_per_tag 4", "1 numbers for 2 tags", "one per tag"),
        ("--env_groups 1", "1 groups are too few for 2 tags", "--env_groups 2"),
        ("--tools python --apply_chat_template", "brings its own tools and cannot use these",
         "leave --tools out"),
        ("--agent_func_path a.py", "each of these plays the whole episode", "leave one out"),
        ("--remote_rm_url r.py", "environments give the rewards themselves",
         "leave --remote_rm_url out"),
        ("--env_tags sokobn", "unknown environment 'sokobn'", "did you mean 'sokoban'"),
    ],
)  # fmt: skip
def test_what_is_refused(extra, problem, fix):
    (found,) = said(PPOConfig, f"{GAMES} {extra}")
    assert problem in found and fix in found


def test_the_port_of_every_engine_is_looked_at():
    """The second engine's is in use."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        words = f"{GRPO} --agent_command python --apply_chat_template --vllm_num_engines 2"
        found = said(PPOConfig, f"{words} --agent_endpoint_port {port - 1}", environment=True)
    assert any(f"port {port} of 127.0.0.1 is not available" in problem for problem in found)


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--reward_funcs number", True),
        ("--reward_pretrain m", True),
        ("--remote_rm_url r.py", False),  # it may say so
        ("--reward_funcs number --tools python --apply_chat_template", False),
    ],
)
def test_a_format_penalty_needs_somebody_who_reads(words, refused):
    flags = f"--pretrain m --prompt_data d {words} --format_penalty -1"
    found = [problem for problem in said(PPOConfig, flags) if "cannot be parsed" in problem]
    assert bool(found) is refused
