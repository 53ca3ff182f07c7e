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


def test_sound_flags_have_no_problems():
    assert said(PPOConfig, GAMES) == []
    assert said(PPOConfig, f"{GAMES} --env_groups 128 --env_groups_per_tag 100 28") == []


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
        ("--env_groups 128 --env_max_trajectories 7",
         "128 groups that play 7 each do not fill a rollout of 1024", "--env_max_trajectories 8"),
        ("--eval_dataset d --eval_steps 1", "plays the same environments, with seeds of its own",
         "leave --eval_dataset out"),
        ("--env_tags sokobn", "unknown environment 'sokobn'", "did you mean 'sokoban'"),
    ],
)  # fmt: skip
def test_what_is_refused(extra, problem, fix):
    (found,) = said(PPOConfig, f"{GAMES} {extra}")
    assert problem in found and fix in found


def test_environments_have_no_split():
    (warning,) = said(PPOConfig, f"{GAMES} --eval_steps 1 --eval_split test")
    assert warning.endswith("without effect in this run:\n  --eval_split acts with --eval_dataset")


def test_the_port_of_every_engine_is_looked_at():
    """The second engine's is in use."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        words = f"{GRPO} --agent_command python --apply_chat_template --vllm_num_engines 2"
        found = said(PPOConfig, f"{words} --agent_endpoint_port {port - 1}", environment=True)
    assert any(f"port {port} of 127.0.0.1 is not available" in problem for problem in found)


def test_engines_do_not_run_out_of_ports():
    words = f"{GRPO} --agent_command python --apply_chat_template --agent_endpoint_port 65000"
    (found,) = [p for p in said(PPOConfig, f"{words} --vllm_num_engines 600", True) if "port" in p]
    assert "600 engines need ports up to 65599" in found and "--agent_endpoint_port 64936" in found


@pytest.mark.parametrize("evaluates", ["--eval_steps 1", "--eval_before_train", ""])
def test_episodes_are_rendered_in_evaluations(evaluates):
    warnings = said(PPOConfig, f"{GAMES} --render_save_dir r {evaluates}")
    assert bool(warnings) is not bool(evaluates)


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


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("worker_cls", "agent_func_path"),
        ("tags", "env_tags"),
        ("n_groups", "env_groups_per_tag"),
        ("num_env_groups", "env_groups"),
        ("group_size", "n_samples_per_prompt"),
        ("max_traj_per_env", "env_max_trajectories"),
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns", "max_turns"),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path", "tools"),
        ("environment_factory", "agent_func_path"),
    ],
)
def test_what_other_systems_call_it_leads_to_our_flag(name, ours):
    (found,) = said(PPOConfig, f"{GRPO} --{name} x")
    assert found == f"--{name}: no such flag here\n       try: --{ours}"


@pytest.mark.parametrize(("name", "ours"), [("gym", "--env_tags"), ("openai", "--agent_command")])
def test_agents_that_are_no_files_lead_to_their_flags(name, ours):
    words = f"--pretrain m --prompt_data d --agent_func_path {name}"
    (found,) = [p for p in said(PPOConfig, words, environment=True) if "agent_func_path" in p]
    assert f"{name} is not a Python file" in found and f"try: {ours}" in found


@pytest.mark.parametrize("flag", ["max_tokens_per_turn", "generate_max_len", "max_turns"])
def test_a_turn_has_a_token(flag):
    assert said(PPOConfig, f"{GAMES} --{flag} 0") == [f"--{flag}: must be > 0, got 0"]


PLAYERS = {
    "file": "--agent_func_path a.py",
    "program": "--agent_func_path a.py --agent_endpoint --apply_chat_template",
    "openenv": "--agent_func_path openenv:ws://127.0.0.1:1",
    "verifiers": "--agent_func_path verifiers:tcp://127.0.0.1:1",
    "command": "--agent_command python --apply_chat_template --remote_rm_url r.py",
    "tags": "--env_tags bandit --max_steps 2",
    "tools": "--tools python --apply_chat_template --remote_rm_url r.py",
}


@pytest.mark.parametrize(
    ("flag", "acts"),
    [
        ("turn_timeout", {"file", "openenv", "tags", "tools"}),
        ("env_step_timeout", {"file", "openenv", "tags", "tools"}),
        ("env_memory_gb", {"file", "program", "command"}),
        ("env_max_concurrency", {"file", "program", "openenv", "command", "tags"}),
        ("agent_endpoint_port", {"program", "verifiers", "command"}),
        ("episode_timeout", {*PLAYERS}),
        ("max_turns", {*PLAYERS}),
    ],
)
def test_a_flag_that_does_nothing_for_who_plays_warns(flag, acts):
    silent = set()
    for name, words in PLAYERS.items():
        data = "" if name == "tags" else "--prompt_data d"
        found = said(PPOConfig, f"--pretrain m {data} {words} --{flag} 7")
        assert all("without effect" in problem for problem in found), found
        silent |= {name} if not found else set()
    assert silent == acts
