"""The interfaces of classes that are not another system's: gym's, programs that ask the endpoint,
and agents of openrl."""

from __future__ import annotations

import inspect
from typing import Any

from openrl.agents.interfaces import AgentInterface
from openrl.extension_points import agent_interfaces
from openrl.processes.interfaces import Signature

AGENT = Signature(1, ("prompt", "generate", "sampling"))


def runs_as_agent(made: Any) -> bool:
    """Whether ``run`` has the parameters of openrl's agents, or at least those no other has."""
    names = {"generate", "sampling"} & {*inspect.signature(made.run).parameters}
    return bool(names) or AGENT.accepts(made.run)


agent_interfaces.add(
    "gym",
    AgentInterface(
        "gym's: reset(seed), step(action)",
        "openrl.agents.files.environments:adapt_gym",
        "openrl.agents.files.build:play_environment",
        {"reset": (Signature(1, ("seed",)),), "step": (Signature(2),)},
        rank=2,
    ),
)
agent_interfaces.add(
    "agent",
    AgentInterface(
        "an agent of ours: async run(prompt, generate, sampling)",
        "openrl.agents.files.adapter:Adapter",
        methods={"run": (AGENT,)},
        known_by=runs_as_agent,
        rank=3,
        plays_alone=True,
    ),
)
agent_interfaces.add(
    "program",
    AgentInterface(
        "an agent of the endpoint: run(data, base_url, api_key)",
        "openrl.agents.files.program:ProgramAdapter",
        "openrl.agents.files.build:play_program",
        {"run": (Signature(2, ("base_url", "api_key")),)},
        rank=4,
        needs_endpoint=True,
    ),
)
