"""Agents that ask the chat endpoint, in the process of the file: ``run(data, base_url, api_key)``,
and Molt's ``ChatAgent.run(ctx)``."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from openrl.agents.base import EpisodeResult
from openrl.agents.foreign import user_code
from openrl.agents.foreign.player import Player
from openrl.agents.foreign.shims import ChatContext
from openrl.types import FinishReason, Prompt, Sampling, message_text


class ProgramPlayer(Player):
    """Each episode has an object of the class."""

    async def play(self, prompt: Prompt, sampling: Sampling, root: str, key: str) -> EpisodeResult:
        """Play an episode. ``root`` and ``key`` are those of its ``Session``."""
        agent = await user_code.construct(self._class)
        messages = user_code.chat_for_clients(prompt)
        if user_code.takes(agent.run, "base_url"):
            data = {**prompt.meta, "messages": messages, "prompt": prompt.text}
            data["label"] = prompt.label
            return read(await user_code.result(agent.run(data, base_url=f"{root}/v1", api_key=key)))
        context = ChatContext(
            messages=messages,
            tools=prompt.meta.get("tools"),
            prompt=message_text(messages[-1]),
            label=prompt.label,
            images=user_code.pictures(prompt) or None,
            base_url=f"{root}/s/{key}/v1",  # its clients send no key
            session_url=f"{root}/s/{key}",  # without /v1
            model_name="policy",
            api_key="EMPTY",
            session_id=key,
            sampling_params=SimpleNamespace(**user_code.sampling_values(sampling)),
            max_length=sampling.max_len or len(prompt.token_ids) + sampling.max_tokens,
        )
        return read(await user_code.result(agent.run(context)))


def read(found: Any) -> EpisodeResult:
    """Read what ``run`` returned: None, a number, the dict of ``read_scores``, or Molt's Result."""
    if found is None:
        return EpisodeResult()
    if isinstance(found, Mapping):
        return user_code.read_scores(found)
    if hasattr(found, "terminated"):
        reward = user_code.scalar(found.reward, "the reward")
        passed = user_code.verdict(reward if found.score is None else found.score, reward)
        end = FinishReason.LENGTH if found.truncated else None
        return EpisodeResult(reward, passed, user_code.numbers(found.info), end)
    return EpisodeResult(user_code.scalar(found, "the reward"))
