"""The environments of --env_tags. Our own games compute for microseconds, so they play in the event
loop of the engine's worker, and so do asynchronous ones, which wait there. All others of --plugin,
and those around other people's libraries, may hang, crash or eat memory; each of their episodes has
a process to itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from openrl.agents.base import Agent, Environment, Generate
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.environments.agent import EnvironmentAgent
from openrl.agents.environments.gym import make_environment
from openrl.agents.files.build import FileAgent, open_pool, process_limits
from openrl.agents.files.calls import AgentInfo, MethodCall
from openrl.agents.files.environments import EnvironmentAdapter
from openrl.config.groups.agent import (
    EnvironmentTagFlags,
    TurnFlags,
    needs_process,
    read_env_config,
)
from openrl.extension_points import agent_interfaces
from openrl.processes.child import ChildProcess
from openrl.processes.worker import Loaded
from openrl.registry import load_plugins
from openrl.types import Prompt, Sampling, Trajectory

Settings = Mapping[str, Mapping[str, Any]]
"""The settings of each tag."""


@dataclass(frozen=True)
class TagTarget:
    """What a process plays: the environments of these tags."""

    settings: Settings
    plugins: tuple[str, ...]

    def __str__(self) -> str:
        return f"--env_tags {' '.join(self.settings)}"

    def load(self) -> Loaded:
        load_plugins(self.plugins)
        adapter = EnvironmentAdapter(self.make)
        return Loaded(adapter.call, AgentInfo(agent_interfaces["gym"].component, ""))

    def make(self, prompt: Prompt, sampling: Sampling) -> Environment:
        return make_environment(prompt.source, self.settings[prompt.source])


class TagAgent:
    """Plays the environment of a prompt's tag."""

    def __init__(self, by_tag: Mapping[str, Agent]) -> None:
        self.by_tag = by_tag

    async def run(
        self, prompt: Prompt, generate: Generate, sampling: Sampling
    ) -> Trajectory | list[Trajectory]:
        """Play an episode. Raises the same as ``EnvironmentAgent.run``."""
        return await self.by_tag[prompt.source].run(prompt, generate, sampling)


@asynccontextmanager
async def open_tag_agent(
    flags: EnvironmentTagFlags, plugins: tuple[str, ...], config: EpisodeConfig
) -> AsyncIterator[Agent]:
    """Open the agent of one engine. Raises UserError for a setting that an environment does not
    know."""
    settings = tag_settings(flags)
    here = EnvironmentAgent(lambda p: make_environment(p.source, settings[p.source]), config)
    apart = {tag: given for tag, given in settings.items() if needs_process(tag)}
    if not apart:
        yield here
        return
    async with open_pool(TagTarget(apart, plugins), config.limits, "environment") as pool:
        there = FileAgent(pool, config, None)
        yield TagAgent({tag: there if tag in apart else here for tag in settings})


def tag_settings(flags: EnvironmentTagFlags) -> Settings:
    """Return the settings of each of --env_tags. Raises UserError for a setting that its
    environment does not know."""
    given = read_env_config(flags.env_config, flags.env_tags) if flags.env_config else {}
    settings = {tag: given.get(tag, {}) for tag in flags.env_tags}
    for tag, of_tag in settings.items():
        make_environment(tag, of_tag)
    return settings


async def first_observation(
    tag: str, settings: Settings, plugins: tuple[str, ...], limits: TurnFlags
) -> Any:
    """Return what the environment shows first with the seed 0. Raises whatever it raises, or
    CallFailed if it plays in a process."""
    prompt = Prompt(tag, [], "", source=tag)
    if not needs_process(tag):
        return await make_environment(tag, settings[tag]).reset(0, prompt)
    target = TagTarget({tag: settings[tag]}, plugins)
    with ChildProcess(target, process_limits(limits), "environment") as process:
        first, _ = process.call(MethodCall("reset", (0, prompt, Sampling(1))))
        return first
