"""Flags of agents, their tools and their environments."""

from __future__ import annotations

import inspect
import shlex
import shutil
from functools import partial
from typing import Any, Literal

from openrl.errors import UserError
from openrl.extension_points import agent_servers, environments
from openrl.flags.schema import Condition, absent, flag, given, group
from openrl.flags.sources import read_table
from openrl.flags.values import SECONDS_OR_0

SERVED = Condition(
    lambda config: bool(config.agents.server[0]) and not config.agents.server_plays_alone,
    "with a server in --agent_func_path whose turns openrl plays",
)
SERVED_ALONE = Condition(
    lambda config: config.agents.server_plays_alone,
    "with a server in --agent_func_path that asks the endpoint",
)
AGENT = given("agent_func_path") | given("agent_command") | given("env_tags") | given("tools")
FILE = Condition(
    lambda config: bool(config.agents.agent_func_path) and not config.agents.server[0],
    "with --agent_func_path FILE.py",
)


def needs_process(tag: str) -> bool:
    """Whether the environment ``tag`` runs other people's code that may block."""
    game = environments[tag].component
    own = game.__module__.startswith("openrl.") and not getattr(game, "needs_process", False)
    return not own and not inspect.iscoroutinefunction(getattr(game, "step", None))


APART = Condition(
    lambda config: any(
        needs_process(tag) for tag in config.environments.env_tags if tag in environments.names()
    ),
    "with --env_tags reasoning_gym or one of --plugin",
)
STEPS = FILE | SERVED | given("env_tags") | given("tools")
"""openrl runs the turn loop for these; programs and some servers run their own."""


@group("Agent")
class TurnFlags:
    """Limits of an episode."""

    max_turns: int | None = flag(
        None,
        "Most turns in an episode. None: until it is done or out of tokens.",
        bounds="> 0",
        only_if=AGENT,
    )
    max_tokens_per_turn: int | None = flag(
        None,
        "Most new tokens in one turn. None: whatever is left of --generate_max_len, which limits"
        " all tokens after the first prompt, including those from environment and tools.",
        bounds="> 0",
        only_if=AGENT,
    )
    turn_timeout: float = flag(
        0.0,
        "Seconds for one turn: the reply and the environment's step. 0: no limit. Agents that"
        " play the whole episode themselves use --episode_timeout instead.",
        bounds=SECONDS_OR_0,
        only_if=(STEPS, absent("agent_endpoint")),
    )
    episode_timeout: float = flag(
        0.0,
        "Seconds for one episode, after which it is cut; an openrl agent class from a file counts"
        " as failed. 0: no limit, but one hour for whatever plays against the chat endpoint.",
        bounds=SECONDS_OR_0,
    )
    env_step_timeout: float = flag(
        300.0,
        "Seconds for one environment step, after which it counts as failed and the episode is"
        " played once more; and for one tool call, after which the policy is told. 0: no limit.",
        bounds=SECONDS_OR_0,
        only_if=(STEPS, absent("agent_endpoint")),
    )
    env_memory_gb: float = flag(
        8.0,
        "GiB of memory that one environment, agent or program, including the processes it starts,"
        " may use before it is killed.",
        bounds="(0, 1e6]",
        only_if=FILE | given("agent_command") | APART,
    )
    env_max_concurrency: int = flag(
        0,
        "Most processes that run at a time beside one engine: one for each agent program, and for"
        " each environment or agent from a file or --plugin. For other environments, most steps at"
        " a time. The rest waits. 0: 64 processes, any number of steps.",
        bounds=">= 0",
        only_if=FILE | SERVED | given("agent_command") | given("env_tags"),
    )

    @property
    def max_concurrency(self) -> int:
        """How many processes or programs run at a time beside one engine."""
        return self.env_max_concurrency or 64

    @property
    def max_concurrent_steps(self) -> int:
        """How many steps of environments that have no process are taken at a time."""
        return self.env_max_concurrency or 2**31

    @property
    def memory(self) -> int:
        """The most bytes of one of them and what it starts."""
        return int(self.env_memory_gb * 2**30)


@group("Agent")
class AgentFlags(TurnFlags):
    agent_func_path: str | None = flag(
        None,
        "Agent or environment from a file, PATH.py[:CLASS], whose class is recognised by its"
        " methods, or from a server, SERVER:ADDRESS; docs/agents.md lists both. None: one turn,"
        " --tools, --env_tags or --agent_command.",
        may_hold_secrets=True,
    )
    agent_command: str | None = flag(
        None,
        "Program that plays one episode against a chat endpoint on this machine; OPENAI_BASE_URL,"
        " OPENAI_API_KEY and ANTHROPIC_* point it there. The episode ends when the program exits.",
    )
    agent_endpoint: bool = flag(
        False,
        "Give the class of --agent_func_path a chat endpoint on 127.0.0.1 that records the tokens"
        " of each rollout; its run(data, base_url, api_key) plays one episode. --agent_command"
        " and servers that ask one always have one.",
        only_if=FILE | SERVED_ALONE | given("agent_command"),
    )
    agent_endpoint_port: int = flag(
        0,
        "Port of the first engine's endpoint; each further engine uses the next port. 0: any free"
        " ports.",
        bounds="[0, 65000]",
        only_if=given("agent_endpoint") | SERVED_ALONE | given("agent_command"),
    )
    tools: str | None = flag(
        None,
        "Tools of the agent, comma separated: a Python file, FILE.py[:NAME] (its public, typed,"
        " documented functions, or one of them), another file that docs/tools.md lists, the URL of"
        " an MCP server, or python, which runs programs in a sandbox.",
        may_hold_secrets=True,
    )
    tool_parser: str | None = flag(
        None,
        "Syntax of tool calls, e.g. hermes or json; docs/tools.md lists them. None: the one that"
        " reads back what the chat template writes.",
        only_if=given("tools") | FILE | SERVED_ALONE | given("agent_command"),
    )
    agent_sample_unit: Literal["trajectory", "step"] = flag(
        "trajectory",
        "What one training row holds: a whole trajectory, or one turn with the turns before it as"
        " context, as gigpo and step_reinforce need it.",
        only_if=AGENT,
    )

    @property
    def server(self) -> tuple[str, str]:
        """Kind and address of the server that --agent_func_path names; empty texts without one."""
        kind, _, address = (self.agent_func_path or "").partition(":")
        if kind in agent_servers.names() and address.startswith(
            agent_servers[kind].component.schemes
        ):
            return kind, address
        return "", ""

    @property
    def server_plays_alone(self) -> bool:
        """Whether that server plays episodes against the chat endpoint."""
        kind, _ = self.server
        return bool(kind) and agent_servers[kind].component.plays_alone


@group("Agent")
class EnvironmentTagFlags:
    env_tags: tuple[str, ...] = flag(
        (),
        "Environments to play in: bandit, calculator, countdown, frozen_lake, number_game,"
        " reasoning_gym, search, sokoban, or those of --plugin. They replace --prompt_data: each"
        " prompt is a seed.",
    )
    env_config: str | None = flag(
        None,
        "YAML or JSON file: {tag: settings} for --env_tags, or {name: value}, the env_config that"
        " a class of --agent_func_path takes. None: their defaults.",
        only_if=given("env_tags") | FILE,
    )


of_tags = partial(flag, only_if=given("env_tags"))


@group("Agent")
class EnvironmentFlags(EnvironmentTagFlags):
    env_groups: int | None = of_tags(
        None,
        "Groups that run at a time; a group is --n_samples_per_prompt equal environments. None:"
        " --rollout_batch_size.",
        bounds="> 0",
    )
    env_groups_per_tag: tuple[int, ...] | None = of_tags(
        None, "How many of --env_groups each tag gets. None: evenly.", bounds="> 0"
    )
    env_max_trajectories: int = of_tags(
        -1,
        "Most trajectories that one environment plays for a training step, including those of"
        " groups that --dynamic_filtering rejects. -1: any number.",
        bounds="-1 or > 0",
    )
    env_group_redundancy: int = of_tags(
        0,
        "Extra environments in each group; the group is complete once --n_samples_per_prompt of"
        " them have ended.",
        bounds=">= 0",
    )

    def groups_per_tag(self, groups: int) -> dict[str, int]:
        """Return how many of ``groups`` each of --env_tags gets: as given, or else evenly."""
        each, more = divmod(groups, len(self.env_tags))
        even = tuple(each + (place < more) for place in range(len(self.env_tags)))
        return dict(zip(self.env_tags, self.env_groups_per_tag or even, strict=True))


def split_command(command: str) -> list[str]:
    """Return the words of --agent_command. Raises UserError if there is no such program."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"--agent_command: cannot be parsed: {error}") from error
    program = words[0] if words else ""
    if shutil.which(program) is None:
        message = f"--agent_command: no such program: {program!r}"
        raise UserError(message, "a program on $PATH, or a path to one")
    return words


def read_class_config(path: str) -> dict[str, Any]:
    """Return the settings of a file's class. Raises UserError for anything but a table of them."""
    table = read_table(path, "env_config")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table):
        raise UserError(
            f"--env_config: {path} does not map names to values", "lines of the form  name: value"
        )
    return table


def read_env_config(path: str, tags: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return the settings of each tag. Raises UserError for anything but a table of them."""
    table = read_table(path, "env_config")
    if not isinstance(table, dict) or not all(isinstance(row, dict) for row in table.values()):
        raise UserError(
            f"--env_config: {path} does not map tags to settings",
            "lines of the form  tag: {name: value}",
        )
    if unknown := [tag for tag in table if tag not in tags]:
        message = f"--env_config: {path}: {unknown[0]} is not in --env_tags"
        raise UserError(message, f"one of {', '.join(tags)}")
    return table
