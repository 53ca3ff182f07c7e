"""What flags of agents and environments are refused, before anything starts."""

import socket

import pytest

from openrl.config import derived
from openrl.config.commands import PPOConfig
from tests.flags import GRPO, said, settle

GAMES = (
    "--pretrain m --advantage_estimator group_norm --n_samples_per_prompt 8 --max_steps 2"
    " --env_tags sokoban bandit"
)


@pytest.mark.parametrize(
    ("extra", "running", "tried"),
    [
        ("", 1024, 10**6),
        ("--env_groups 128", 128, 10**6),
        ("--env_groups 128 --env_max_trajectories 16", 128, 2048),
    ],
)
def test_how_many_groups_run_and_how_many_a_step_may_try(extra, running, tried):
    config, problems = settle(PPOConfig, f"{GAMES} {extra}")
    assert not problems
    assert derived.prompts_running(config) == running
    assert derived.prompts_to_try(config, 10**6) == tried


def test_the_port_of_every_engine_is_looked_at():
    """The second engine's is in use."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        words = f"{GRPO} --agent_command python --apply_chat_template --vllm_num_engines 2"
        found = said(PPOConfig, f"{words} --agent_endpoint_port {port - 1}", environment=True)
    assert any(f"port {port} of 127.0.0.1 is not available" in problem for problem in found)
