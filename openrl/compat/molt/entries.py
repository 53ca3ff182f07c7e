"""Molt: its agent files.

    Env         reset(state), step(state) -> Result, whose texts are concatenated as they are
    ChatAgent   run(ctx) -> Result, against the chat endpoint

Its runners name the class that they would run."""

import sys
from functools import partial
from typing import Any

from openrl.agents.files.own import runs_as_agent
from openrl.agents.interfaces import AgentInterface
from openrl.compat.shared.classes import class_of_runner, has_base
from openrl.extension_points import agent_interfaces, stand_ins
from openrl.processes.interfaces import Signature, parameters, takes

HOME = "openrl.compat.molt.stand_ins"
stand_ins.add(
    "Molt", dict.fromkeys(("molt.agents", "molt.agents.base", "molt.agents.chat_agent"), HOME)
)


def is_environment(made: Any) -> bool:
    """Whether it is derived from ``Env``, or takes a state in a file that uses Molt."""
    if has_base(made, "molt", "Env"):
        return True
    around = vars(sys.modules[made.__module__]).values()
    used = any("molt" in str(getattr(value, "__module__", "")).split(".") for value in around)
    return used and [*parameters(made.step)][1:2] == ["state"]


def is_chat_agent(made: Any) -> bool:
    if has_base(made, "molt", "ChatAgent"):
        return True
    alone = Signature(2).accepts(made.run) and not takes(made.run, "base_url")
    return alone and not runs_as_agent(made)


agent_interfaces.add(
    "molt_environment",
    AgentInterface(
        "Molt's Env: async reset(state), async step(state)",
        "openrl.compat.molt.adapters:adapt_environment",
        "openrl.compat.shared.raw_text_agent:play_raw_text",
        {"reset": (Signature(2),), "step": (Signature(2),)},
        known_by=is_environment,
        main_classes=("AgentRunner",),
        named_by=partial(class_of_runner, runner="EnvRunner", attribute="env_cls"),
    ),
)
agent_interfaces.add(
    "molt_chat_agent",
    AgentInterface(
        "Molt's ChatAgent: async run(ctx)",
        "openrl.compat.molt.adapters:ChatAgentAdapter",
        "openrl.agents.files.build:play_program",
        {"run": (Signature(2),)},
        known_by=is_chat_agent,
        rank=3,
        main_classes=("AgentRunner",),
        named_by=partial(class_of_runner, runner="AgentRunner", attribute="agent_cls"),
        needs_endpoint=True,
    ),
)
