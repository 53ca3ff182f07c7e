"""Stand-ins for the modules that agent files of other systems import, where these systems are not
installed. They hold base classes, which tell what a class is for."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

# -- OpenRLHF --------------------------------------------------------------------------------------


class AgentInstanceBase:
    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return states


class AgentExecutorBase:
    """The base of classes with ``execute``."""


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Names the AgentInstance that it would play."""

    def __init__(self, agent_instance_cls: type) -> None:
        self.agent_instance_cls = agent_instance_cls


class SingleTurnAgentExecutor(AgentExecutorBase):
    """Plays one turn. Subclasses build on it."""

    def __init__(self, remote_rm_url: Any = None) -> None:
        assert not remote_rm_url, "rewards come from --remote_rm_url or from the executor itself"

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        before = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        output = await llm_engine.generate(before, deepcopy(sampling_params))
        tokens = [*before, *output.outputs[0].token_ids]
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": tokens,
            "action_ranges": [(len(before), len(tokens))],
            "rollout_log_probs": None,  # the engine's own record counts
            "reward": None,
            "scores": None,
            "extra_logs": {},
        }


# -- Molt ------------------------------------------------------------------------------------------


@dataclass
class Result:
    reward: Any = 0.0
    observation: str = ""
    terminated: bool = True
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    score: Any = None
    images: list[Any] | None = None
    sampling_params: Any = None


class Env:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def reset(self, state: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return state

    async def close(self) -> None:
        pass


class ChatAgent:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class Runner:
    """The base of classes that name what they would run."""


class StepEnvRunner(Runner):
    def __init__(self, env_cls: type) -> None:
        self.env_cls = env_cls


class ChatAgentRunner(Runner):
    def __init__(self, agent_cls: type) -> None:
        self.agent_cls = agent_cls


class ChatContext(SimpleNamespace):
    """The argument of ``ChatAgent.run``."""


# -- SkyRL -----------------------------------------------------------------------------------------


class BaseTextEnv:
    def init(self, prompt: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        return prompt, {}

    def close(self) -> None:
        pass

    def get_metrics(self) -> dict[str, Any]:
        return {}


def by_name(*classes: type) -> dict[str, Any]:
    return {made.__name__: made for made in classes}


_OPENRLHF = by_name(
    AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor
)
_MOLT = by_name(ChatAgent, ChatAgentRunner, ChatContext, Env, Result, Runner, StepEnvRunner)
_SKYRL = {"BaseTextEnv": BaseTextEnv, "BaseTextEnvStepOutput": dict, "ConversationType": list}
_MODULES: dict[str, dict[str, Any]] = {
    "openrlhf.utils.agent": _OPENRLHF,
    "openrlhf.utils.logging_utils": {"init_logger": logging.getLogger},
    "molt.agents": _MOLT,
    "molt.agents.base": _MOLT,
    "molt.agents.chat_agent": _MOLT,
    "skyrl_gym.envs.base_text_env": _SKYRL,
}
WRAPPED = ("agent_instance_cls", "env_cls", "agent_cls")
"""Attributes in which the runners of these systems keep the class that they run."""


def install_shims(modules: Mapping[str, Mapping[str, Any]] = _MODULES) -> None:
    """Install the stand-ins of systems that are not installed."""
    tops = {name.split(".")[0] for name in modules}
    missing = {t for t in tops if t not in sys.modules and importlib.util.find_spec(t) is None}
    for name, contents in modules.items():
        if name.split(".")[0] in missing:
            vars(_package(name)).update(contents)


def _package(name: str) -> ModuleType:
    """Return the stand-in of that name, which is made if there is none, as are its parents."""
    if name not in sys.modules:
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = []  # makes it a package, which can have submodules
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(_package(parent), own, package)
    return sys.modules[name]
