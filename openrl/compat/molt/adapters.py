"""Plays Molt's environments and chat agents in the process of their file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from openrl.agents.base import EpisodeResult, Step
from openrl.agents.files import user_code
from openrl.agents.files.adapter import Adapter
from openrl.agents.files.environments import EnvironmentAdapter
from openrl.agents.files.program import read
from openrl.compat.molt.stand_ins import ChatContext
from openrl.compat.shared.arguments import pictures, sampling_values
from openrl.compat.shared.raw_text import adapt_raw_text, content, text_of
from openrl.types import FinishReason, Prompt, Sampling, message_text
from openrl.waiting import maybe_await


def adapt_environment(made: type) -> EnvironmentAdapter:
    return adapt_raw_text(made, read_result)


def read_result(found: Any) -> tuple[Step, Any]:
    """Read the Result of a step."""
    reward = user_code.scalar(found.reward, "the reward")
    step = Step(
        content(text_of(found.observation), found.images),
        reward=reward,
        done=bool(found.terminated),
        truncated=bool(found.truncated),
        passed=user_code.verdict(found.reward if found.score is None else found.score, reward),
        metrics=user_code.numbers(found.info),
    )
    return step, found.sampling_params


class ChatAgentAdapter(Adapter):
    """Each episode has an object of the class."""

    async def play(self, prompt: Prompt, sampling: Sampling, root: str, key: str) -> EpisodeResult:
        """Play an episode. ``root`` and ``key`` are those of its ``Session``."""
        agent = await user_code.construct(self._class)
        messages = user_code.chat_for_clients(prompt)
        context = ChatContext(
            messages=messages,
            tools=prompt.meta.get("tools"),
            prompt=message_text(messages[-1]),
            label=prompt.label,
            images=pictures(prompt) or None,
            base_url=f"{root}/s/{key}/v1",  # its clients send no key
            session_url=f"{root}/s/{key}",  # without /v1
            model_name="policy",
            api_key="EMPTY",
            session_id=key,
            sampling_params=SimpleNamespace(**sampling_values(sampling)),
            max_length=sampling.max_len or len(prompt.token_ids) + sampling.max_tokens,
        )
        found = await maybe_await(agent.run(context))
        return read_episode(found) if hasattr(found, "terminated") else read(found)


def read_episode(found: Any) -> EpisodeResult:
    """Read the Result of a run."""
    reward = user_code.scalar(found.reward, "the reward")
    passed = user_code.verdict(reward if found.score is None else found.score, reward)
    finish_reason = FinishReason.LENGTH if found.truncated else None
    return EpisodeResult(reward, passed, user_code.numbers(found.info), finish_reason)
