"""Flags of agents, their tools and their environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml

from openrl.errors import UserError
from openrl.flags.schema import absent, flag, given, group

AGENT = given("agent_func_path") | given("agent_command") | given("env_tags") | given("tools")


@group("Agent", only_if=AGENT)
class TurnFlags:
    """Limits of an episode."""

    max_turns: int | None = flag(
        None, "Most turns of a dialogue. None: until it is done or out of tokens.", bounds="> 0"
    )
    max_tokens_per_turn: int | None = flag(
        None,
        "Most new tokens in one turn. None: what --generate_max_len leaves, which bounds all tokens"
        " after the first prompt, those of environment and tools included.",
        bounds="> 0",
    )
    turn_timeout: float = flag(
        0.0,
        "Seconds one turn may take, reply and environment; 0: no limit. Agents that play the whole"
        " episode themselves have --episode_timeout.",
        bounds=">= 0",
        only_if=(absent("agent_command"), absent("agent_endpoint")),
    )
    episode_timeout: float = flag(
        0.0,
        "Seconds one episode may take, then it is cut; an agent of ours from a file has failed."
        " 0: no limit, and an hour for programs that speak to the endpoint.",
        bounds=">= 0",
    )
    env_step_timeout: float = flag(
        300.0,
        "Seconds one step of an environment may take; then it has failed, and the episode is played"
        " again once. One call of a tool: then the policy is told. 0: no limit.",
        bounds=">= 0",
    )
    env_memory_gb: float = flag(
        8.0,
        "GiB of memory that an environment or agent from a file, or a program, and what it starts,"
        " may take before it is killed.",
        bounds="> 0",
        only_if=given("agent_func_path") | given("agent_command"),
    )
    env_max_concurrency: int = flag(
        0,
        "Environments and agents from files, each a process, or programs, that one engine's worker"
        " keeps at a time; other episodes wait. 0: 64.",
        bounds=">= 0",
    )


@group("Agent")
class AgentFlags(TurnFlags):
    agent_func_path: str | None = flag(
        None,
        "Agent or environment in a file: PATH.py[:CLASS] with a class of ours, OpenRLHF, TRL, Molt,"
        " SkyRL or gym, recognised by its methods; or on a server: openenv:URL,"
        " verifiers:tcp://HOST:PORT. None: one turn, --tools, --env_tags or --agent_command.",
    )
    agent_command: str | None = flag(
        None,
        "Program that plays one episode against a chat endpoint on this machine; it finds the"
        " endpoint in OPENAI_BASE_URL, OPENAI_API_KEY and ANTHROPIC_*, and its exit ends the"
        " episode.",
    )
    agent_endpoint: bool = flag(
        False,
        "Give the class of --agent_func_path a chat endpoint on 127.0.0.1, which captures the"
        " tokens of each rollout: its run(data, base_url, api_key) plays an episode."
        " --agent_command and verifiers: have it anyway.",
        only_if=given("agent_func_path") | given("agent_command"),
    )
    agent_endpoint_port: int = flag(
        0,
        "Port of the first engine's endpoint, the next one's is one higher; 0: free ports.",
        bounds="[0, 65000]",
        only_if=given("agent_func_path") | given("agent_command"),
    )
    tools: str | None = flag(
        None,
        "Tools of the agent: a Python file whose public, typed, documented functions they are, a"
        " YAML file of verl's tools, the URL of an MCP server, or python, which runs programs in a"
        " sandbox; commas separate them.",
    )
    tool_parser: str | None = flag(
        None,
        "Syntax of tool calls: hermes, qwen3_coder, llama, mistral, glm, deepseek, json. None: as"
        " the chat template writes them.",
        only_if=given("tools") | given("agent_command") | given("agent_func_path"),
    )
    agent_sample_unit: Literal["trajectory", "step"] = flag(
        "trajectory",
        "What a training row is: a whole trajectory, or one of its turns with the turns before it"
        " as context, as gigpo and step_reinforce take them.",
        only_if=AGENT,
    )
    render_save_dir: str | None = flag(
        None,
        "Directory for the evaluated answers and episodes: a transcript, a page with the images"
        " that the policy saw, and where an environment draws its state a GIF. None: none.",
    )


@group("Agent")
class EnvironmentTagFlags:
    env_tags: tuple[str, ...] = flag(
        (),
        "Environments to play in: bandit, calculator, countdown, frozen_lake, number_game,"
        " reasoning_gym, search, sokoban, or those of --plugin. They take the place of"
        " --prompt_data: each prompt is a seed.",
    )
    env_config: str | None = flag(
        None,
        "YAML or JSON file {tag: settings} of the environments. None: their defaults.",
        only_if=given("env_tags"),
    )


@group("Agent", only_if=given("env_tags"))
class EnvironmentFlags(EnvironmentTagFlags):
    env_groups: int | None = flag(
        None,
        "Groups of equal environments, --n_samples_per_prompt each, that run at a time. None:"
        " --rollout_batch_size.",
        bounds="> 0",
    )
    env_groups_per_tag: tuple[int, ...] | None = flag(
        None, "How many of --env_groups each tag gets. None: evenly.", bounds="> 0"
    )
    env_max_trajectories: int = flag(
        -1,
        "Most trajectories that one environment plays for a training step, those of groups that"
        " --dynamic_filtering turns down among them; -1: any number.",
        bounds="-1 or > 0",
    )
    env_group_redundancy: int = flag(
        0,
        "Further environments in each group, which is complete with the first"
        " --n_samples_per_prompt that end.",
        bounds=">= 0",
    )


def split_agent_path(given: str) -> tuple[str, str | None]:
    """Split PATH.py[:CLASS] in two.

    >>> split_agent_path("agents.py:Guess")
    ('agents.py', 'Guess')
    """
    path, _, name = given.rpartition(".py:")
    return (f"{path}.py", name) if path else (given, None)


def read_env_config(path: str, tags: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return the settings of each tag. Raises UserError for anything but a table of them."""
    try:
        table = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(table, dict) or not all(isinstance(row, dict) for row in table.values()):
        raise UserError(f"{path} is no table of settings", "lines of the form  tag: {name: value}")
    if unknown := [tag for tag in table if tag not in tags]:
        raise UserError(f"{path}: {unknown[0]} is none of --env_tags", f"one of {', '.join(tags)}")
    return table
