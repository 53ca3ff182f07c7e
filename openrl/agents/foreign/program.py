"""Agents that ask the chat endpoint, in the process of the file: ``run(data, base_url, api_key)``,
and Molt's ``ChatAgent.run(ctx)``."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from openrl.agents.base import EpisodeResult
from openrl.agents.foreign.calls import (
    chat_for_clients,
    construct,
    numbers,
    pictures,
    read_scores,
    result,
    sampling_values,
    scalar,
    takes,
    verdict,
)
from openrl.agents.foreign.player import Player
from openrl.agents.foreign.shims import ChatContext
from openrl.types import End, Prompt, Sampling, message_text


class ProgramPlayer(Player):
    """Each episode has an object of the class."""

    async def play(self, prompt: Prompt, sampling: Sampling, root: str, key: str) -> EpisodeResult:
        """Play an episode. ``root`` and ``key`` are those of its ``Session``."""
        agent = await construct(self._class)
        messages = chat_for_clients(prompt)
        if takes(agent.run, "base_url"):
            data = {**prompt.meta, "messages": messages, "prompt": prompt.text}
            data["label"] = prompt.label
            return read(await result(agent.run(data, base_url=f"{root}/v1", api_key=key)))
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
        return read(await result(agent.run(context)))


def read(found: Any) -> EpisodeResult:
    """Read what ``run`` returned: None, a number, the dict of ``read_scores``, or Molt's Result."""
    if found is None:
        return EpisodeResult()
    if isinstance(found, Mapping):
        return read_scores(found)
    if hasattr(found, "terminated"):
        reward = scalar(found.reward, "the reward")
        passed = verdict(reward if found.score is None else found.score)
        end = End.LENGTH if found.truncated else None
        return EpisodeResult(reward, passed, numbers(found.info), end)
    return EpisodeResult(scalar(found, "the reward"))
