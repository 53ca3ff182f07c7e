"""Stand-ins for OpenRLHF's modules that agent files import: base classes, which tell what a class
is for."""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import Any

init_logger = logging.getLogger


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
