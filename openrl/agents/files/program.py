"""Agents that ask the chat endpoint, in their file's process: ``run(data, base_url, api_key)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openrl.agents.base import EpisodeResult
from openrl.agents.files import user_code
from openrl.agents.files.adapter import Adapter
from openrl.types import Prompt, Sampling
from openrl.waiting import maybe_await


class ProgramAdapter(Adapter):
    """Each episode has an object of the class."""

    async def play(self, prompt: Prompt, sampling: Sampling, root: str, key: str) -> EpisodeResult:
        """Play an episode. ``root`` and ``key`` are those of its ``Session``."""
        agent = await user_code.construct(self._class)
        messages = user_code.chat_for_clients(prompt)
        data = {**prompt.meta, "messages": messages, "prompt": prompt.text, "label": prompt.label}
        return read(await maybe_await(agent.run(data, base_url=f"{root}/v1", api_key=key)))


def read(found: Any) -> EpisodeResult:
    """Read what ``run`` returned: None, a number, or the dict of ``read_scores``."""
    if found is None:
        return EpisodeResult()
    if isinstance(found, Mapping):
        return user_code.read_scores(found)
    return EpisodeResult(user_code.scalar(found, "the reward"))
